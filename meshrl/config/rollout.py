"""The keys of rollout.* and their checks."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from meshrl.config.base import Slice, field
from meshrl.config.source import Problem, Value
from meshrl.config.values import show

if TYPE_CHECKING:
    from meshrl.config.run import RunConfig

CAN_RELEASE_MEMORY = ("embedded", "vllm", "sglang")


class RolloutMeshConfig(Slice):
    """Ranks along each axis of the samplers' mesh."""

    dp: int = field(-1, "replicas of the engine; -1 = as many as the ranks allow", ge=-1)
    infer_tp: int = field(1, "tensor-parallel ranks of one replica", ge=1)


class SamplingConfig(Slice):
    temperature: float = field(
        1.0, "the logits are divided by it, in sampler and trainer; 1 = the distribution of the model", ge=0
    )
    max_new_tokens: int = field(
        256, "limit of an answer in tokens; if an agent takes several turns, limit of each turn", ge=1
    )
    top_p: float = field(
        1.0,
        "sample only from the most likely tokens that together have this probability; 1 = off, as training requires",
        gt=0,
        le=1,
    )
    top_k: int = field(0, "sample only from the k most likely tokens; 0 = off, as training requires", ge=0)
    min_p: float = field(
        0.0,
        "sample only from tokens at least min_p times as likely as the most likely one; 0 = off, as training requires",
        ge=0,
        lt=1,
    )
    repetition_penalty: float = field(
        1.0, "above 1 makes tokens that are already in the row less likely; 1 = off, as training requires", gt=0
    )
    stop_token_ids: list[int] = field(
        [], "ids that end a turn, in addition to those of the tokenizer, its chat template and generation_config.json"
    )
    stop: list[str] = field(
        [],
        "texts that end a turn, such as </tool_call>; the token that completes one stays in the answer: it is trained, "
        "and rewards and agents read it",
    )


_PYTHON = "path of the Python in which {} and meshrl are installed; null = the Python that runs meshrl"
_MEMORY_SHARE = (
    "share of a GPU's memory for the server's weights and KV cache; half leaves room for a trainer on that GPU"
)
_START_DEADLINE = "seconds in which the server must start and answer; a large model's weights take minutes to load"


class VllmConfig(Slice):
    """How each replica's vLLM server is started."""

    python: str | None = field(None, _PYTHON.format("vLLM"))
    args: list[str] = field([], "more arguments for vLLM's API server, written as on its command line")
    kv_cache_bytes: int | None = field(
        None, "bytes of the KV cache on each device; null = by gpu_memory_utilization on a GPU, 1 GiB on a CPU", ge=1
    )
    gpu_memory_utilization: float = field(0.5, _MEMORY_SHARE, gt=0, le=1)
    start_deadline_s: float = field(600.0, _START_DEADLINE, gt=0)


class SglangConfig(Slice):
    """How each replica's SGLang server is started, or the address of a running server."""

    url: str | None = field(
        None,
        "address of a server that already runs on this machine, such as http://127.0.0.1:30000, for a single replica; "
        "null = each replica starts its own server",
    )
    api_key_env: str | None = field(
        None, "environment variable that holds the API key of the server at url; null = it needs none"
    )
    python: str | None = field(None, _PYTHON.format("SGLang"))
    args: list[str] = field([], "more arguments for sglang.launch_server, written as on its command line")
    deterministic: bool = field(
        True,
        "answers depend only on seed and prompt, not on other requests; false is faster, but seeds have no effect then",
    )
    mem_fraction_static: float = field(0.5, _MEMORY_SHARE, gt=0, le=1)
    start_deadline_s: float = field(600.0, _START_DEADLINE, gt=0)


OWN_ARGS = {  # set by meshrl: with other values its checks of weights and logprobs would not hold
    "vllm": """
        --model --uds --host --port --dtype --max-model-len --max-num-seqs --tensor-parallel-size --data-parallel-size
        --pipeline-parallel-size --worker-extension-cls --logprobs-mode --generation-config --seed
        --kv-cache-memory-bytes --gpu-memory-utilization --skip-tokenizer-init --enable-scale-out --enable-sleep-mode
    """,
    "sglang": """
        --model-path --host --port --api-key --dtype --tp-size --tensor-parallel-size --dp-size --data-parallel-size
        --context-length --max-running-requests --mem-fraction-static --custom-weight-loader --skip-tokenizer-init
        --incremental-streaming-output --enable-deterministic-inference --enable-memory-saver
    """,
}


class EndpointConfig(Slice):
    """Any server with an OpenAI-like /v1/completions that returns token ids and logprobs."""

    url: str | None = field(None, "the server's address without /v1, such as http://127.0.0.1:8000")
    model: str | None = field(None, "the name of the model on the server; null = the only one that it serves")
    api_key_env: str | None = field(None, "environment variable that holds the server's API key; null = it needs none")
    weights: Literal["none", "files"] = field(
        "none",
        "how the server gets new weights: files = each version is written to a folder, then reload_url is called; "
        "none = it never gets new weights, which is enough for evaluation",
    )
    reload_url: str | None = field(
        None,
        'address that gets a POST with {"model_path": folder} and answers {"success": true} when the weights are '
        "loaded; null = /update_weights_from_disk of the server",
    )
    folder: str | None = field(
        None,
        "folder to which weight versions are written; the server must be able to read it; null = a temporary folder of "
        "this machine",
    )


class RolloutConfig(Slice):
    engine: Literal["embedded", "vllm", "sglang", "endpoint"] = field(
        "embedded",
        "the engine that samples; embedded runs the model's Transformers module and needs no further packages; sglang "
        "is experimental: it has never been run with a real SGLang server",
    )
    vllm: VllmConfig = field(VllmConfig(), "the server of engine vllm")
    sglang: SglangConfig = field(SglangConfig(), "the server of engine sglang")
    endpoint: EndpointConfig = field(EndpointConfig(), "the server of engine endpoint")
    tensor_model_parallel_size: int | None = field(
        None, "another name of rollout.mesh.infer_tp; if both are given they must agree", ge=1
    )
    pipeline_model_parallel_size: int = field(1, "pipeline stages of one replica", ge=1)
    mesh: RolloutMeshConfig = field(RolloutMeshConfig(), "ranks along each axis of the samplers' mesh")
    sampling: SamplingConfig = field(SamplingConfig(), "sampling parameters")
    max_running_requests: int = field(
        256, "rows that one replica decodes together; more is faster until memory runs out", ge=1
    )
    max_context_tokens: int | None = field(
        None, "limit of prompt + answer in tokens; null = the model's max_position_embeddings", ge=1
    )
    sync_bucket_bytes: int = field(
        64 << 20,
        "limit in bytes of the weights that all senders together have in transfer at one time; a sync needs twice this "
        "memory",
        ge=1024,
        le=1 << 31,
    )
    sync_mode: Literal["full", "delta"] = field(
        "full",
        "full = send all weights; delta = send only weights that changed since the last sync, if the sampler has that "
        "version. delta sends fewer bytes, but needs one more copy of the weights in the sampler's dtype, sharded over "
        "the train ranks; each replica of an engine other than embedded needs one more copy in host memory. With LoRA, "
        "an embedded sampler always gets only the adapters; another engine gets only the adapters with delta, "
        "and merged weights with full",
    )

    release_memory: bool = field(
        False,
        "samplers on the train ranks' devices free their weights and KV caches while the train ranks train; each sync "
        "then sends all weights",
    )
    sync_transport: Literal["auto", "broadcast"] = field(
        "auto",
        "how weights are sent to samplers in separate ranks: auto = by shared memory, or by TCP between machines; "
        "broadcast = by a process group of each sender and all samplers (NCCL on GPUs, else gloo), for many samplers",
    )

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of one replica, from either of the two keys."""
        return self.tensor_model_parallel_size or self.mesh.infer_tp


def engine_problems(given: Mapping[str, Value], config: RunConfig, purpose: str) -> Iterator[Problem]:
    """Problems of the choice of the engine or of its keys. purpose: train | eval."""
    rollout = config.rollout
    tp_key = "rollout.mesh.infer_tp" if "rollout.mesh.infer_tp" in given else "rollout.tensor_model_parallel_size"
    yield from _sampling(config, purpose)
    yield from _mesh(config)
    if rollout.engine == "embedded" and rollout.tp_size > 1:
        yield Problem((tp_key,), "not possible: the embedded engine has the full model in each replica. Use 1.")
    if rollout.release_memory:
        yield from _release(rollout)
    if rollout.engine == "vllm":
        yield from _python("vllm", rollout.vllm.python, ("rollout.engine", "rollout.vllm.python"))
        yield from _args("vllm", rollout.vllm.args)
        yield from _replicas(config, tp_key)
    if rollout.engine == "sglang":
        yield from _sglang(config)
        yield from _args("sglang", rollout.sglang.args)
        yield from _replicas(config, tp_key)
    if rollout.engine == "endpoint":
        yield from _endpoint(config, purpose, tp_key)


def _sampling(config: RunConfig, purpose: str) -> Iterator[Problem]:
    sampling, rollout = config.rollout.sampling, config.rollout
    if purpose == "train":
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            if getattr(sampling, name) != off:
                yield Problem(
                    (f"rollout.sampling.{name}",),
                    "a filter samples from another distribution than the trainer scores, which biases every ratio. "
                    f"In training leave it at {show(off)} (off).",
                )
    if sampling.temperature == 0 and (purpose == "train" or config.loop.eval_samples > 1):
        text = "temperature 0 gives every sample of a prompt the same answer. Use a temperature above 0 (1.0 is usual)."
        yield Problem(("rollout.sampling.temperature",), text)
    if any(token < 0 for token in sampling.stop_token_ids):
        yield Problem(("rollout.sampling.stop_token_ids",), "token ids are 0 or more.")
    if any(not text for text in sampling.stop):
        yield Problem(("rollout.sampling.stop",), "an empty text would end every turn at its first token. Remove it.")
    need, room = config.data.max_prompt_tokens + sampling.max_new_tokens, rollout.max_context_tokens
    if room is not None and need > room:
        yield Problem(
            ("rollout.max_context_tokens", "data.max_prompt_tokens", "rollout.sampling.max_new_tokens"),
            f"the longest prompt and answer need {need} tokens, but the context has {room}: answers would be cut. "
            "Lower max_prompt_tokens or max_new_tokens, or raise max_context_tokens.",
        )


def _mesh(config: RunConfig) -> Iterator[Problem]:
    name, ranks = config.sampling_ranks
    replicas = max(1, ranks // config.rollout.tp_size)
    if config.rollout.mesh.dp not in (-1, replicas):
        number = f"{replicas} replica{'s' if replicas > 1 else ''}"
        text = f"the ranks make {number} of the sampler: use {replicas}, or -1 for as many as there are."
        yield Problem(("rollout.mesh.dp", name), text)


def _release(cfg: RolloutConfig) -> Iterator[Problem]:
    if cfg.engine not in CAN_RELEASE_MEMORY:
        engines = ", ".join(CAN_RELEASE_MEMORY)
        text = f"engine {cfg.engine} can't release its memory. Leave it out, or use one of {engines}."
        yield Problem(("rollout.release_memory", "rollout.engine"), text)
    if cfg.sync_mode == "delta":
        text = "a sampler that released its weights has none to which a delta could be applied. Use one of the two."
        yield Problem(("rollout.release_memory", "rollout.sync_mode"), text)


_NOT_INSTALLED = {
    "vllm": "vLLM is not installed here. Install it as docs/install.md describes (scripts/install.sh with --vllm); "
    "on a machine without a GPU run scripts/install.sh --cpu --vllm, and set "
    "rollout.vllm.python=.venv-vllm/bin/python. To use another Python that has vLLM and meshrl, set the same key.",
    "sglang": "SGLang is not installed here. Install it (pip install sglang, on a machine with a GPU), or set "
    "rollout.sglang.python to a Python that has it and meshrl, or rollout.sglang.url to a running server.",
}


def _python(engine: str, python: str | None, keys: tuple[str, ...]) -> Iterator[Problem]:
    """Problems of the Python that runs the engine's server. keys: by which one can be found."""
    if python is None and importlib.util.find_spec(engine) is None:
        yield Problem(keys, _NOT_INSTALLED[engine])
    elif python is not None and shutil.which(python) is None:
        text = "no such program. Give the path of a Python, such as venv/bin/python."
        yield Problem((f"rollout.{engine}.python",), text)


def _args(engine: str, args: list[str]) -> Iterator[Problem]:
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        if name in OWN_ARGS[engine].split():
            text = f"{name} is set by meshrl itself, from its own keys. Leave it out."
            yield Problem((f"rollout.{engine}.args",), text)


def _sglang(config: RunConfig) -> Iterator[Problem]:
    cfg = config.rollout.sglang
    if cfg.url is not None:
        yield from _address("rollout.sglang.url", cfg.url)
        name, ranks = config.sampling_ranks
        if ranks != config.rollout.tp_size:
            text = (
                f"one server is one replica, of tp ranks, but {ranks} ranks sample. Without a url each replica starts "
                "its own server."
            )
            yield Problem(("rollout.sglang.url", name), text)
    elif cfg.api_key_env is not None:
        text = "a server that meshrl starts gets a key of its own. Leave it out."
        yield Problem(("rollout.sglang.api_key_env",), text)
    else:
        keys = ("rollout.engine", "rollout.sglang.python", "rollout.sglang.url")
        yield from _python("sglang", cfg.python, keys)


def _endpoint(config: RunConfig, purpose: str, tp_key: str) -> Iterator[Problem]:
    cfg = config.rollout.endpoint
    if cfg.url is None:
        yield Problem(("rollout.endpoint.url", "rollout.engine"), "the engine endpoint needs the address of a server.")
    else:
        yield from _address("rollout.endpoint.url", cfg.url)
    if purpose == "train" and cfg.weights == "none":
        text = (
            "a server whose weights never change can be evaluated, but can't sample for training after the first "
            "step. Use weights: files if the server can load a folder, or engine vllm or sglang."
        )
        yield Problem(("rollout.endpoint.weights",), text)
    if cfg.reload_url is not None:
        yield from _address("rollout.endpoint.reload_url", cfg.reload_url)
    if config.rollout.tp_size > 1:
        yield Problem((tp_key,), "an endpoint's server decides itself how it splits the model. Leave it out.")
    name, ranks = config.sampling_ranks
    if ranks != 1:
        text = f"one endpoint is one sampler, but {ranks} ranks sample. Use cluster.num_rollout_ranks: 1."
        yield Problem(("rollout.engine", name), text)


def _address(key: str, url: str) -> Iterator[Problem]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield Problem((key,), "must be an address with its scheme, such as http://127.0.0.1:30000.")


def _replicas(config: RunConfig, tp_key: str) -> Iterator[Problem]:
    """One server uses the devices of tp consecutive ranks on one machine."""
    tp = config.rollout.tp_size
    name, ranks = config.sampling_ranks
    if ranks % tp:
        yield Problem((tp_key, name), f"{ranks} ranks can't be split into replicas of {tp} ranks each.")
        return
    cluster = config.cluster
    first = cluster.num_train_ranks if cluster.num_rollout_ranks else 0
    per_node = max(1, (cluster.num_train_ranks + cluster.num_rollout_ranks) // cluster.nodes)
    if any(lead // per_node != (lead + tp - 1) // per_node for lead in range(first, first + ranks, tp)):
        text = f"a replica of {tp} ranks would be on two machines, of {per_node} ranks each."
        yield Problem((tp_key, "cluster.nodes"), text)


def unused_engine_keys(rollout: RolloutConfig) -> dict[str, str]:
    """Keys of another engine -> why they have no effect."""
    found: dict[str, str] = {}
    for engine, slice_ in (("vllm", VllmConfig), ("sglang", SglangConfig), ("endpoint", EndpointConfig)):
        if rollout.engine != engine:
            found |= {f"rollout.{engine}.{name}": f"rollout.engine is {rollout.engine}" for name in slice_.model_fields}
    if rollout.sglang.url is not None:
        names = ("python", "args", "mem_fraction_static", "start_deadline_s")
        why = "the server at rollout.sglang.url already runs"
        found |= dict.fromkeys((f"rollout.sglang.{name}" for name in names), why)
    if rollout.engine == "endpoint" and rollout.endpoint.weights == "none":
        found |= dict.fromkeys(
            ("rollout.endpoint.reload_url", "rollout.endpoint.folder"), "rollout.endpoint.weights is none"
        )
    return found
