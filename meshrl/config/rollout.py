from typing import Literal

from meshrl.config.base import Slice, field


class RolloutMeshConfig(Slice):
    """Ranks along each axis of the sampler's mesh."""

    dp: int = field(-1, "replicas of the engine; -1 = as many as the ranks allow", ge=-1)
    infer_tp: int = field(1, "tensor-parallel ranks of one replica", ge=1)


class SamplingConfig(Slice):
    temperature: float = field(
        1.0, "divides the logits, in sampler and trainer alike; 1 samples the model as it is", ge=0
    )
    max_new_tokens: int = field(256, "longest answer in tokens; of one turn, where an agent takes several", ge=1)
    top_p: float = field(
        1.0,
        "samples from the likeliest tokens that hold this share of the mass; 1 = off, which training needs",
        gt=0,
        le=1,
    )
    top_k: int = field(0, "samples from the k most likely tokens only; 0 = off, which training needs", ge=0)
    min_p: float = field(
        0.0, "drops tokens less likely than min_p times the likeliest; 0 = off, which training needs", ge=0, lt=1
    )
    repetition_penalty: float = field(
        1.0, "divides the logits of tokens already in the row; 1 = off, which training needs", gt=0
    )
    stop_token_ids: list[int] = field(
        [], "ids that end a turn, beside those of the tokenizer, its chat template and generation_config.json"
    )
    stop: list[str] = field(
        [],
        "texts that end a turn, as </tool_call>; the token that completes one stays whole, is trained, and is part of "
        "what rewards and agents read",
    )


class VllmConfig(Slice):
    """How each replica's vLLM server is started."""

    python: str | None = field(
        None, "the Python that vLLM and meshrl are installed in, as a path; null = the one that runs meshrl"
    )
    args: list[str] = field([], "more arguments for vLLM's API server, written as on its command line")
    kv_cache_bytes: int | None = field(
        None, "bytes of its KV cache on each device; null = gpu_memory_utilization decides, and 1 GiB on a CPU", ge=1
    )
    gpu_memory_utilization: float = field(
        0.5, "share of a GPU's memory for its weights and cache; half leaves room for a trainer beside it", gt=0, le=1
    )
    start_deadline_s: float = field(
        600.0, "seconds until the server must answer; a large model's weights take minutes to load", gt=0
    )


VLLM_OWN_ARGS = (  # set by meshrl: another value would break what it proves
    "--model",
    "--uds",
    "--host",
    "--port",
    "--dtype",
    "--max-model-len",
    "--max-num-seqs",
    "--tensor-parallel-size",
    "--data-parallel-size",
    "--pipeline-parallel-size",
    "--worker-extension-cls",
    "--logprobs-mode",
    "--generation-config",
    "--seed",
    "--kv-cache-memory-bytes",
    "--gpu-memory-utilization",
    "--skip-tokenizer-init",
    "--enable-scale-out",
    "--enable-sleep-mode",
)


class SglangConfig(Slice):
    """How each replica's SGLang server is started, or where the one that runs is."""

    url: str | None = field(
        None,
        "a server on this machine that runs already, as http://127.0.0.1:30000, for a single replica; null = each "
        "replica starts its own",
    )
    api_key_env: str | None = field(
        None, "environment variable that holds the key of the server at url; null = it asks for none"
    )
    python: str | None = field(
        None, "the Python that SGLang and meshrl are installed in, as a path; null = the one that runs meshrl"
    )
    args: list[str] = field([], "more arguments for sglang.launch_server, written as on its command line")
    deterministic: bool = field(
        True,
        "answers follow from seed and prompt alone, whatever else is sampled; off is faster, and seeds then count for "
        "nothing",
    )
    mem_fraction_static: float = field(
        0.5, "share of a GPU's memory for its weights and cache; half leaves room for a trainer beside it", gt=0, le=1
    )
    start_deadline_s: float = field(
        600.0, "seconds until the server must answer; a large model's weights take minutes to load", gt=0
    )


SGLANG_OWN_ARGS = (  # set by meshrl: another value would break what it proves
    "--model-path",
    "--host",
    "--port",
    "--api-key",
    "--dtype",
    "--tp-size",
    "--tensor-parallel-size",
    "--dp-size",
    "--data-parallel-size",
    "--context-length",
    "--max-running-requests",
    "--mem-fraction-static",
    "--custom-weight-loader",
    "--skip-tokenizer-init",
    "--incremental-streaming-output",
    "--enable-deterministic-inference",
    "--enable-memory-saver",
)


class EndpointConfig(Slice):
    """Any server with an OpenAI-like /v1/completions that returns token ids and logprobs."""

    url: str | None = field(None, "the server's address without /v1, as http://127.0.0.1:8000")
    model: str | None = field(None, "what the server calls the model; null = the only one that it serves")
    api_key_env: str | None = field(None, "environment variable that holds the server's key; null = it asks for none")
    weights: Literal["none", "files"] = field(
        "none",
        "how new weights reach it: files = each version is written to a folder, and reload_url called; none = not at "
        "all, for evaluation",
    )
    reload_url: str | None = field(
        None,
        'called by POST with {"model_path": folder} and must answer {"success": true} when the weights are in place; '
        "null = /update_weights_from_disk of the server",
    )
    folder: str | None = field(
        None, "where versions are written, in sight of the server; null = a temporary folder of this machine"
    )


class RolloutConfig(Slice):
    engine: Literal["embedded", "vllm", "sglang", "endpoint"] = field(
        "embedded", "who samples; embedded runs the model's own Transformers module and needs nothing installed"
    )
    vllm: VllmConfig = field(VllmConfig(), "the server of engine vllm")
    sglang: SglangConfig = field(SglangConfig(), "the server of engine sglang")
    endpoint: EndpointConfig = field(EndpointConfig(), "the server of engine endpoint")
    tensor_model_parallel_size: int | None = field(
        None, "another name of rollout.mesh.infer_tp; if both are given they must agree", ge=1
    )
    pipeline_model_parallel_size: int = field(1, "pipeline stages of one replica", ge=1)
    mesh: RolloutMeshConfig = field(RolloutMeshConfig(), "the sampler's ranks")
    sampling: SamplingConfig = field(SamplingConfig(), "how training rollouts are drawn")
    max_running_requests: int = field(
        256, "rows that one replica decodes together; more is faster until memory runs out", ge=1
    )
    max_context_tokens: int | None = field(
        None, "longest prompt + answer in tokens; null = the model's max_position_embeddings", ge=1
    )
    sync_bucket_bytes: int = field(
        64 << 20,
        "bytes of one bucket of a weight sync; a sync takes the memory of two on top",
        ge=1024,
        le=1 << 31,
    )
    sync_mode: Literal["full", "delta"] = field(
        "full",
        "full sends all weights; delta only those that changed since the last sync, where the sampler holds that: "
        "fewer bytes, for one more copy of the weights in the sampler's dtype, spread over the train ranks, and one in "
        "the memory of the machine beside each replica of another engine than embedded. With LoRA the adapters "
        "alone travel",
    )

    release_memory: bool = field(
        False,
        "while the train ranks train, samplers on their devices give up the memory of their weights and caches; each "
        "sync then sends all weights",
    )
    sync_transport: Literal["auto", "files", "broadcast"] = field(
        "auto",
        "how weights reach samplers in ranks of their own: auto = shared memory, and TCP between machines; broadcast = "
        "one process group of each sender and all samplers (NCCL on GPUs, else gloo), which many samplers want; files "
        "= by sync_folder, where machines share a disk and no route",
    )
    sync_folder: str | None = field(None, "a folder that all ranks see, for sync_transport files")

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of one replica, under whichever name they were given."""
        return self.tensor_model_parallel_size or self.mesh.infer_tp
