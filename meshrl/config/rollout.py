"""The keys of rollout.* and their checks."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from meshrl.config.base import COLOCATED, EVALUATED, OnlyWith, Slice, Unless
from meshrl.config.case import Case, Problem
from meshrl.config.model import LoraConfig
from meshrl.config.source import COMMAND_LINE
from meshrl.config.values import show
from meshrl.core.errors import ConfigError

CAN_RELEASE_MEMORY = ("embedded", "vllm", "sglang")
VLLM_IMAGE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # model types whose images vLLM was tested with


class RolloutMeshConfig(Slice):
    """Ranks along each axis of the samplers' mesh."""

    dp: int = Field(-1, ge=-1)
    """replicas of the engine; -1 = as many as the ranks allow"""
    infer_tp: int = Field(1, ge=1)
    """tensor-parallel ranks of one replica"""


class SamplingConfig(Slice):
    temperature: float = Field(1.0, ge=0)
    """the logits are divided by it, in sampler and trainer; 1 = the distribution of the model"""
    max_new_tokens: int = Field(256, ge=1)
    """limit of an answer in tokens; if an agent takes several turns, limit of each turn"""
    top_p: float = Field(1.0, gt=0, le=1)
    """sample only from the most likely tokens that together have this probability; 1 = off, as training requires"""
    top_k: int = Field(0, ge=0)
    """sample only from the k most likely tokens; 0 = off, as training requires"""
    min_p: float = Field(0.0, ge=0, lt=1)
    """sample only from tokens at least min_p times as likely as the most likely one; 0 = off, as training requires"""
    repetition_penalty: float = Field(1.0, gt=0)
    """above 1 makes tokens that are already in the row less likely; 1 = off, as training requires"""
    stop_token_ids: list[int] = Field([])
    """ids that end a turn, in addition to those of the tokenizer, its chat template and generation_config.json;
    exported models have all of them"""
    stop: list[str] = Field([])
    """texts that end a turn, such as </tool_call>; the token that completes one stays in the answer: it is trained, and
    rewards and agents read it. Exported models do not have them: generate takes stop_strings and the tokenizer"""


class EvalSamplingConfig(Slice):
    """Sampling parameters of evaluations, in training and in `meshrl eval`; null = as in rollout.sampling."""

    temperature: float | None = Field(None, ge=0)
    """as rollout.sampling.temperature; null = 0 (greedy) with loop.eval_samples=1, else rollout.sampling.temperature"""
    max_new_tokens: int | None = Field(None, ge=1)
    """as rollout.sampling.max_new_tokens; null = the same number"""
    top_p: float | None = Field(None, gt=0, le=1)
    """as rollout.sampling.top_p, and allowed in training, because no evaluation is trained; null = the same number"""
    top_k: int | None = Field(None, ge=0)
    """as top_p, for rollout.sampling.top_k"""
    min_p: float | None = Field(None, ge=0, lt=1)
    """as top_p, for rollout.sampling.min_p"""
    repetition_penalty: float | None = Field(None, gt=0)
    """as top_p, for rollout.sampling.repetition_penalty"""


class EmbeddedConfig(Slice):
    """Limits of the embedded engine."""

    kv_cache_bytes: int | None = Field(None, ge=1)
    """bytes of the KV cache on each device; requests wait while those that run could need more; null = 80 % of the free
    memory of an accelerator, no limit on a CPU"""
    prefix_cache: bool | None = None
    """retain keys and values of ended requests until the next sync, so that a request which continues one, such as the
    next turn of a conversation, computes only what is new; it takes memory, within kv_cache_bytes up to four times that
    of running requests. Requests that run or wait at the same time share the start of their contexts in any case. null
    = if an agent takes several turns"""


_BY_SHARE = OnlyWith("rollout.vllm.kv_cache_bytes", None, "rollout.vllm.kv_cache_bytes sets the size of the KV cache")
_STARTED = OnlyWith("rollout.sglang.url", None, "the server at rollout.sglang.url already runs")
_RUNNING = Unless("rollout.sglang.url", None, "a server that meshrl starts gets a key of its own")


class VllmConfig(Slice):
    """How each replica's vLLM server is started."""

    python: str | None = None
    """path of the Python in which vLLM and meshrl are installed; null = the Python that runs meshrl"""
    args: list[str] = Field([])
    """more arguments for vLLM's API server, written as on its command line"""
    kv_cache_bytes: int | None = Field(None, ge=1)
    """bytes of the KV cache on each device; null = by gpu_memory_utilization on a GPU, 1 GiB on a CPU"""
    gpu_memory_utilization: Annotated[float, _BY_SHARE] = Field(0.5, gt=0, le=1)
    """share of a GPU's memory for the server's weights and KV cache; half leaves room for a trainer on that GPU. With
    cluster.num_rollout_ranks above 0 the default is 0.9, since samplers have devices of their own"""
    start_deadline_s: float = Field(1800.0, gt=0)
    """seconds in which the server must start and answer; loading and compiling a large model takes minutes"""


class SglangConfig(Slice):
    """How each replica's SGLang server is started, or the address of a running server."""

    url: str | None = None
    """address of a server that already runs on this machine, such as http://127.0.0.1:30000, for a single replica; null
    = each replica starts its own server"""
    api_key_env: Annotated[str | None, _RUNNING] = None
    """environment variable that holds the API key of the server at url; null = it needs none"""
    python: Annotated[str | None, _STARTED] = None
    """path of the Python in which SGLang and meshrl are installed; null = the Python that runs meshrl"""
    args: Annotated[list[str], _STARTED] = Field([])
    """more arguments for sglang.launch_server, written as on its command line"""
    deterministic: bool = True
    """answers depend only on seed and prompt, not on other requests; false is faster, but seeds have no effect then"""
    mem_fraction_static: Annotated[float, _STARTED] = Field(0.5, gt=0, le=1)
    """share of a GPU's memory for the server's weights and KV cache; half leaves room for a trainer on that GPU. With
    cluster.num_rollout_ranks above 0 the default is 0.9, since samplers have devices of their own"""
    start_deadline_s: Annotated[float, _STARTED] = Field(1800.0, gt=0)
    """seconds in which the server must start and answer; loading and compiling a large model takes minutes"""


OWN_ARGS = {  # set by meshrl: with other values its checks of weights and logprobs would not hold
    "vllm": """
        --model --uds --host --port --dtype --max-model-len --max-num-seqs --tensor-parallel-size --data-parallel-size
        --pipeline-parallel-size --worker-extension-cls --logprobs-mode --generation-config --seed
        --kv-cache-memory-bytes --gpu-memory-utilization --skip-tokenizer-init --enable-scale-out --enable-sleep-mode
        --mm-device-do-normalize --no-mm-device-do-normalize -tp -pp -dp
    """,
    "sglang": """
        --model-path --host --port --api-key --config --dtype --tp-size --tensor-parallel-size --dp-size
        --data-parallel-size --context-length --max-running-requests --mem-fraction-static --custom-weight-loader
        --skip-tokenizer-init --incremental-streaming-output --enable-deterministic-inference --enable-memory-saver
    """,
}


_GETS_WEIGHTS = Unless("rollout.endpoint.weights", "none")


class EndpointConfig(Slice):
    """Any server with an OpenAI-like /v1/completions that returns token ids and logprobs."""

    url: str | None = None
    """the server's address without /v1, such as http://127.0.0.1:8000"""
    model: str | None = None
    """the name of the model on the server; null = the only one that it serves"""
    api_key_env: str | None = None
    """environment variable that holds the server's API key; null = it needs none"""
    weights: Literal["none", "files"] = "none"
    """how the server gets new weights: files = each version is written to a folder, then reload_url is called; none =
    it never gets new weights, which is enough for evaluation"""
    reload_url: Annotated[str | None, _GETS_WEIGHTS] = None
    """address that gets a POST with {"model_path": folder} and answers {"success": true} when the weights are loaded;
    null = /update_weights_from_disk of the server"""
    folder: Annotated[str | None, _GETS_WEIGHTS] = None
    """folder to which weight versions are written; the server must be able to read it; null = a temporary folder of
    this machine"""


class RolloutConfig(Slice):
    engine: Literal["embedded", "vllm", "sglang", "endpoint"] = "embedded"
    """the engine that samples; embedded runs the model's Transformers module and needs no further packages; sglang was
    tested with SGLang 0.5.23 on a CPU, never on a GPU"""
    embedded: Annotated[EmbeddedConfig, OnlyWith("rollout.engine", "embedded")] = EmbeddedConfig()
    """limits of engine embedded"""
    vllm: Annotated[VllmConfig, OnlyWith("rollout.engine", "vllm")] = VllmConfig()
    """the server of engine vllm"""
    sglang: Annotated[SglangConfig, OnlyWith("rollout.engine", "sglang")] = SglangConfig()
    """the server of engine sglang"""
    endpoint: Annotated[EndpointConfig, OnlyWith("rollout.engine", "endpoint")] = EndpointConfig()
    """the server of engine endpoint"""
    tensor_model_parallel_size: int | None = Field(None, ge=1)
    """another name of rollout.mesh.infer_tp; if both are given they must agree"""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """pipeline stages of one replica"""
    mesh: RolloutMeshConfig = RolloutMeshConfig()
    """ranks along each axis of the samplers' mesh"""
    sampling: SamplingConfig = SamplingConfig()
    """sampling parameters"""
    eval_sampling: Annotated[EvalSamplingConfig, EVALUATED] = EvalSamplingConfig()
    """sampling parameters of evaluations, where they differ"""
    router_replay: bool = False
    """for mixtures of experts with the embedded engine (R3, rollout routing replay): it records the experts that it
    selects for each token, and the trainer selects the same, with the scores of its own routers"""
    max_running_requests: int = Field(256, ge=1)
    """rows that one replica decodes together; more is faster until memory runs out"""
    max_context_tokens: int | None = Field(None, ge=1)
    """limit of prompt + answer in tokens; null = the model's max_position_embeddings"""
    sync_bucket_bytes: int | None = Field(None, ge=1024, le=1 << 31)
    """limit in bytes of the weights that all senders together have in transfer at one time; all senders together need
    twice this memory, by broadcast each rank does; null = 64 MiB in host memory, 1 GiB on accelerators"""
    sync_mode: Literal["full", "delta"] = "full"
    """full = send all weights; delta = send only weights that changed since the last sync, if the sampler has that
    version. delta sends fewer bytes, but needs one more copy of the weights in the sampler's dtype, sharded over the
    train ranks; each replica of an engine other than embedded needs one more copy in host memory. On one machine
    without torchrun or broadcast, where sending all weights takes less time, delta is the same as full.
    With LoRA, an embedded sampler always gets only the adapters; another engine gets only the adapters with
    delta, and merged weights with full; with adapters of experts all get merged weights"""

    release_memory: Annotated[bool | None, COLOCATED] = None
    """samplers on the train ranks' devices free their weights and KV caches while the train ranks train; each sync then
    sends all weights; null = on accelerators, if the engine can and sync_mode is full. With LoRA on one train rank the
    embedded sampler keeps the frozen weights, because it computes with the trainer's own tensors"""
    sync_transport: Annotated[Literal["auto", "broadcast"], Unless("cluster.num_rollout_ranks", 0)] = "auto"
    """how weights are sent to samplers in separate ranks: broadcast = by one process group of all senders and samplers
    (NCCL on GPUs, else gloo), for many samplers; auto = broadcast between GPUs, else by shared memory, or by TCP
    between machines"""

    def releases(self, on_accelerators: bool) -> bool:
        """Whether colocated samplers release their memory."""
        if self.release_memory is not None:
            return self.release_memory
        return on_accelerators and self.uses_device and self.sync_mode == "full"

    @property
    def uses_device(self) -> bool:
        """Whether a rank that samples uses a device: for the engine in its process, or for a server that it starts."""
        return self.engine != "endpoint" and (self.engine != "sglang" or self.sglang.url is None)

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of one replica, from either of the two keys."""
        return self.tensor_model_parallel_size or self.mesh.infer_tp

    @property
    def start_deadline_s(self) -> float:
        """Seconds in which the server of a replica must start; 0 for an engine that starts none."""
        return {"vllm": self.vllm.start_deadline_s, "sglang": self.sglang.start_deadline_s}.get(self.engine, 0.0)

    def takes_adapters(self, lora: LoraConfig) -> bool:
        """Whether LoRA adapters are sent separately from the base weights; else the trainer sends merged weights.

        A server has no adapters, but the rank of its engine can keep base and adapters and merge them."""
        return not lora.on_experts and (self.engine == "embedded" or self.sync_mode == "delta")

    def second_copy(self, lora: LoraConfig, num_train_ranks: int, num_rollout_ranks: int) -> str:
        """Why samplers have their own copy of the weights that LoRA does not train; "" if a sampler computes with the
        trainer's own tensors."""
        reasons = {
            "all weights are trained": not lora.enabled,
            "samplers get adapters of experts merged with the weights": lora.on_experts,
            f"engine {self.engine} has its weights in other processes": self.engine != "embedded",
            "samplers are ranks of their own": num_rollout_ranks > 0,
            "each of several train ranks has a shard of the weights, a sampler needs all": num_train_ranks > 1,
        }
        return next((reason for reason, applies in reasons.items() if applies), "")


def engine_problems(case: Case) -> Iterator[Problem]:
    """Problems of rollout.*: of sampling, of the ranks that sample, and of the chosen engine."""
    rollout = case.rl.rollout
    yield from _sampling(case)
    yield from _ranks(case)
    if rollout.release_memory and rollout.engine not in CAN_RELEASE_MEMORY:
        text = f"engine {rollout.engine} can't release its memory. Leave it out, or use one of "
        keys = ("rollout.release_memory", "rollout.engine")
        yield Problem(keys, f"{text}{', '.join(CAN_RELEASE_MEMORY)}.", void=keys[:1])
    if rollout.release_memory and rollout.sync_mode == "delta":
        keys = ("rollout.release_memory", "rollout.sync_mode")
        text = "a sampler that released its weights has none to which a delta could be applied. Use one of the two."
        yield Problem(keys, text, void=keys)
    if rollout.router_replay and rollout.engine != "embedded":
        keys = ("rollout.router_replay", "rollout.engine")
        text = f"engine {rollout.engine} does not return the experts that it selects. Leave it out, or use embedded."
        yield Problem(keys, text, void=keys[:1])
    if rollout.engine == "vllm":
        yield from _own_server(case, rollout.vllm)
    elif rollout.engine == "sglang":
        yield from _sglang(case, rollout.sglang)
    elif rollout.engine == "endpoint":
        yield from _endpoint(rollout.endpoint, case.purpose)


def _sglang(case: Case, cfg: SglangConfig) -> Iterator[Problem]:
    overrides, used = case.rl.rollout.eval_sampling, case.rl.eval_sampling
    if cfg.deterministic and used.min_p:
        text = "min_p ends an SGLang server with deterministic inference. Set it to 0, or deterministic: false."
        section = "sampling" if overrides.min_p is None else "eval_sampling"
        yield Problem((f"rollout.{section}.min_p", "rollout.sglang.deterministic"), text)
    if used.repetition_penalty > 2:
        section = "sampling" if overrides.repetition_penalty is None else "eval_sampling"
        yield Problem((f"rollout.{section}.repetition_penalty", "rollout.engine"), "SGLang allows at most 2.")
    if cfg.url is None:
        yield from _own_server(case, cfg)
        return
    yield from _address("rollout.sglang.url", cfg.url)
    name, ranks = case.rl.sampling_ranks
    if ranks != case.rl.rollout.tp_size:
        text = f"one server is one replica, of tp ranks, but {ranks} ranks sample. Without a url each replica starts "
        yield Problem(("rollout.sglang.url", name), f"{text}its own server.")


def _sampling(case: Case) -> Iterator[Problem]:
    config, sampling, training = case.rl, case.rl.rollout.sampling, case.purpose == "train"
    for name, off in (_FILTERS | {"repetition_penalty": 1.0}).items() if training else ():
        if getattr(sampling, name) != off:
            text = "a filter samples from another distribution than the trainer scores, which biases every ratio. In "
            yield Problem((f"rollout.sampling.{name}",), f"{text}training leave it at {show(off)} (off).")
    text = "temperature 0 gives every sample of a prompt the same answer. Use a temperature above 0 (1.0 is usual)"
    if sampling.temperature == 0 and training:
        yield Problem(("rollout.sampling.temperature",), f"{text}.")
    elif config.eval_sampling.temperature == 0 and config.loop.eval_samples > 1:
        section = "sampling" if config.rollout.eval_sampling.temperature is None else "eval_sampling"
        yield Problem(
            (f"rollout.{section}.temperature", "loop.eval_samples"),
            f"{text}, or loop.eval_samples: 1 for greedy answers.",
        )
    used = config.eval_sampling
    for name in EvalSamplingConfig.model_fields if case.purpose == "eval" else ():
        # On the command line of an evaluation, which samples differently. In a file they are those of the training.
        override = case.given.get(f"rollout.sampling.{name}")
        if override is None or override.origin != COMMAND_LINE:
            continue
        is_idle = used.temperature == 0 and override.value != _FILTERS.get(name, override.value)
        if is_idle or override.value != getattr(used, name):
            greedy = config.loop.eval_samples == 1 and config.rollout.eval_sampling.temperature is None
            how = "is greedy, because loop.eval_samples is 1" if greedy else "samples with rollout.eval_sampling"
            keys = ["temperature", name] if is_idle else [name]
            remedy = " and ".join(f"rollout.eval_sampling.{key}" for key in keys)
            yield Problem((f"rollout.sampling.{name}",), f"would have no effect: the evaluation {how}. Set {remedy}.")
    if any(token < 0 for token in sampling.stop_token_ids):
        yield Problem(("rollout.sampling.stop_token_ids",), "token ids are 0 or more.")
    if "" in sampling.stop:
        yield Problem(("rollout.sampling.stop",), "an empty text would end every turn at its first token. Remove it.")
    room, longest = config.rollout.max_context_tokens, {"sampling": sampling.max_new_tokens}
    if config.rollout.eval_sampling.max_new_tokens is not None:
        longest["eval_sampling"] = config.rollout.eval_sampling.max_new_tokens
    for section, answer in longest.items():
        need = config.data.max_prompt_tokens + answer
        if room is not None and need > room:
            yield Problem(
                ("rollout.max_context_tokens", "data.max_prompt_tokens", f"rollout.{section}.max_new_tokens"),
                f"the longest prompt and answer need {need} tokens, but the context has {room}: answers would be cut. "
                "Lower max_prompt_tokens or max_new_tokens, or raise max_context_tokens.",
            )


_FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # key of rollout.sampling -> the value that means off


def _ranks(case: Case) -> Iterator[Problem]:
    """Problems of the replicas that the sampling ranks form. A server uses the devices of tp consecutive ranks on one
    machine."""
    config, cluster = case.rl, case.rl.cluster
    engine, dp, tp = config.rollout.engine, config.rollout.mesh.dp, config.rollout.tp_size
    tp_keys = tuple(key for key in ("rollout.mesh.infer_tp", "rollout.tensor_model_parallel_size") if key in case.given)
    ranks_key, ranks = config.sampling_ranks
    replicas = max(1, ranks // tp)
    if dp not in (-1, replicas):
        number = f"{replicas} replica{'s' if replicas > 1 else ''}"
        text = f"the ranks make {number} of the sampler. Use {replicas}, or -1 for as many as there are."
        yield Problem(("rollout.mesh.dp", ranks_key, *tp_keys), text, void=("rollout.mesh.dp",))
    texts = {
        "embedded": "the embedded engine has the full model in each replica. Use 1.",
        "endpoint": "an endpoint's server decides itself how it splits the model. Leave it out.",
    }
    if engine in texts and tp > 1:
        yield Problem((*tp_keys, "rollout.engine"), texts[engine], void=tp_keys)
    if engine == "endpoint" and ranks != 1:
        text = f"one endpoint is one sampler, but {ranks} ranks sample. Use cluster.num_rollout_ranks: 1."
        yield Problem(("rollout.engine", ranks_key), text)
    if engine not in OWN_ARGS:
        return
    if ranks % tp:
        yield Problem((*tp_keys, ranks_key), f"{ranks} ranks can't be split into replicas of {tp} ranks each.")
        return
    num_ranks = cluster.num_train_ranks + cluster.num_rollout_ranks
    if text := split_replica(config.rollout, cluster.num_train_ranks, num_ranks, num_ranks // cluster.nodes):
        yield Problem((*tp_keys, "cluster.nodes"), text)


def split_replica(rollout: RolloutConfig, num_train_ranks: int, num_ranks: int, per_node: int) -> str:
    """The problem that a server's replica has ranks on two machines, of per_node ranks each; "" if none has."""
    tp, per_node = rollout.tp_size, max(1, per_node)
    first = num_train_ranks if num_ranks > num_train_ranks else 0  # of those that sample
    if rollout.engine in OWN_ARGS and any(i % per_node + tp > per_node for i in range(first, num_ranks, tp)):
        return (
            f"a replica of rollout.mesh.infer_tp = {tp} ranks would be on two machines, of {per_node} ranks each: use "
            "an infer_tp that divides the ranks of a machine, and as many train ranks as fill replicas."
        )
    return ""


_NOT_INSTALLED = {
    "vllm": "vLLM is not installed here. Install it as docs/install.md describes (scripts/install.sh with --vllm); "
    "on a machine without a GPU run scripts/install.sh --cpu --vllm, and set "
    "rollout.vllm.python=.venv-vllm/bin/python. To use another Python that has vLLM and meshrl, set the same key.",
    "sglang": "SGLang is not installed here. Run scripts/install.sh --sglang, and set "
    "rollout.sglang.python=.venv-sglang/bin/python, or set rollout.sglang.url to a running server.",
}


def require_engine_for_images(engine: str, model_type: str) -> None:
    """Raises: ConfigError if the engine takes no images with a model of this type."""
    if engine != "embedded" and (engine != "vllm" or model_type not in VLLM_IMAGE_MODELS):
        raise ConfigError(
            f"rows have images, which rollout.engine {engine} does not take with a model of type {model_type}. Set "
            f"rollout.engine: embedded; vllm takes images with {', '.join(VLLM_IMAGE_MODELS)}"
        )


def missing_server(rollout: RolloutConfig) -> Problem | None:
    """The problem that the server of each replica could not be started on this machine."""
    engine, cfg = rollout.engine, rollout.vllm if rollout.engine == "vllm" else rollout.sglang
    if engine not in OWN_ARGS or (engine == "sglang" and rollout.sglang.url is not None):
        return None
    if cfg.python is None and importlib.util.find_spec(engine) is None:
        also = ("rollout.sglang.url",) if engine == "sglang" else ()
        text = f"{_NOT_INSTALLED[engine]} rollout.engine=embedded samples without a server."
        return Problem(("rollout.engine", f"rollout.{engine}.python", *also), text)
    if cfg.python is not None and shutil.which(cfg.python) is None:
        text = "no such program. Give the path of a Python, such as venv/bin/python."
        return Problem((f"rollout.{engine}.python",), text)
    return None


def _own_server(case: Case, cfg: VllmConfig | SglangConfig) -> Iterator[Problem]:
    """Problems of the Python and the arguments with which the server of each replica is started."""
    engine, missing = case.rl.rollout.engine, missing_server(case.rl.rollout)
    if case.starts and missing is not None:
        yield missing
    for arg in cfg.args:
        name = arg.partition("=")[0].replace("_", "-")
        own = OWN_ARGS[engine].split()
        abbreviated = name.startswith("--") and any(each.startswith(name) for each in own)
        if name in own or abbreviated:
            text = f"{name} is set by meshrl itself, from its own keys. Leave it out."
            yield Problem((f"rollout.{engine}.args",), text)


def _endpoint(cfg: EndpointConfig, purpose: str) -> Iterator[Problem]:
    if cfg.url is None:
        yield Problem(("rollout.endpoint.url", "rollout.engine"), "the engine endpoint needs the address of a server.")
    else:
        yield from _address("rollout.endpoint.url", cfg.url)
    if cfg.reload_url is not None:
        yield from _address("rollout.endpoint.reload_url", cfg.reload_url)
    if purpose == "train" and cfg.weights == "none":
        text = (
            "a server whose weights never change can be evaluated, but can't sample for training after the first "
            "step. Use weights: files if the server can load a folder, or engine vllm or sglang."
        )
        yield Problem(("rollout.endpoint.weights",), text)


def _address(key: str, url: str | None) -> Iterator[Problem]:
    parts = urlsplit(url or "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield Problem((key,), "must be an address with its scheme, such as http://127.0.0.1:30000.")
