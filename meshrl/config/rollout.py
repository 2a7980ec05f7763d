from typing import Literal

from meshrl.config.base import Slice, field


class RolloutMeshConfig(Slice):
    dp: int = field(-1, "engine replicas; -1 = as many as the ranks allow")
    infer_tp: int = field(1, "tensor-parallel ranks of one replica", ge=1)


class SamplingConfig(Slice):
    temperature: float = field(1.0, "divides the logits, in sampler and trainer alike", ge=0)
    max_new_tokens: int = field(256, "tokens a turn may have", ge=1)
    top_p: float = field(
        1.0, "nucleus filter; training needs 1.0: a filter changes the sampled distribution", gt=0, le=1
    )
    top_k: int = field(0, "keep the k most likely; training needs 0 = off", ge=0)
    min_p: float = field(0.0, "drop tokens below min_p times the best; training needs 0", ge=0, lt=1)
    repetition_penalty: float = field(1.0, "training needs 1.0", gt=0)
    stop_token_ids: list[int] = field([], "extra ids that end a turn, beside the tokenizer's and generation config's")


class RolloutConfig(Slice):
    engine: Literal["embedded", "vllm", "sglang"] = field("embedded", "who samples; embedded needs nothing installed")
    tensor_model_parallel_size: int | None = field(None, "another name of rollout.mesh.infer_tp; both given must agree")
    pipeline_model_parallel_size: int = field(1, "pipeline stages of one replica; only 1 is supported", ge=1)
    mesh: RolloutMeshConfig = field(RolloutMeshConfig(), "layout of the sampler's ranks")
    sampling: SamplingConfig = field(SamplingConfig(), "how training rollouts are drawn")
    max_running_requests: int = field(256, "sequences decoded together by one replica", ge=1)
    max_context_tokens: int | None = field(
        None, "longest prompt + answer; default: the model's max_position_embeddings"
    )
    sync_bucket_bytes: int = field(64 << 20, "cap of one weight-sync bucket; the extra memory of a sync", ge=1024)
