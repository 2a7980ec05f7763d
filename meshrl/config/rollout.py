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
        [], "ids that end a turn, beside those of the tokenizer and of generation_config.json"
    )


class RolloutConfig(Slice):
    engine: Literal["embedded", "vllm", "sglang"] = field(
        "embedded", "who samples; embedded runs the model's own Transformers module and needs nothing installed"
    )
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
        "bytes of one bucket of a weight sync, and so the memory that a sync takes on top",
        ge=1024,
    )
