from typing import Literal

from meshrl.config.base import Slice, field


class TrainMeshConfig(Slice):
    dp_replicate: int = field(1, "copies of the sharded model (HYBRID_SHARD); ranks", ge=1)
    dp_shard: int = field(
        -1, "ranks that share one copy of parameters, gradients, optimizer state; -1 = all that remain"
    )
    ulysses: int = field(1, "sequence-parallel ranks", ge=1)
    tp: int = field(1, "tensor-parallel ranks", ge=1)


class OptimizerConfig(Slice):
    kind: Literal["adamw"] = field("adamw", "decoupled weight decay; the field's default for RL")
    lr: float = field(1e-6, "peak learning rate; 1e-6 is the usual full fine-tuning RL value", gt=0)
    betas: tuple[float, float] = field((0.9, 0.95), "decay of the first and second moment; no unit")
    eps: float = field(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = field(0.0, "decoupled decay per step times lr; 0: RL stays near its start anyway", ge=0)
    clip: float = field(1.0, "largest global gradient norm; larger ones are scaled down; 0 = off", ge=0)


class SchedulerConfig(Slice):
    kind: Literal["constant", "linear", "cosine"] = field("constant", "shape after warm-up, in optimizer steps")
    warmup_steps: int = field(0, "optimizer steps from 0 to the peak lr", ge=0)
    min_lr_ratio: float = field(0.0, "final lr / peak lr of linear and cosine", ge=0, le=1)


class TrainConfig(Slice):
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = field(
        "FULL_SHARD", "what each rank keeps: FULL_SHARD shards parameters, gradients and optimizer state"
    )
    activation_checkpointing: bool = field(
        True, "recompute each block's activations in backward: less memory, +30 % compute"
    )
    mesh: TrainMeshConfig = field(TrainMeshConfig(), "the DeviceMesh's axes")
    tensor_model_parallel_size: int | None = field(None, "another name of train.mesh.tp; both given must agree")
    max_tokens_per_microbatch: int = field(16384, "token budget of one packed micro-batch on one rank", ge=1)
    updates_per_step: int = field(1, "optimizer steps per rollout step; 1 is on-policy", ge=1)
    master_dtype: Literal["float32", "bfloat16"] = field(
        "float32", "dtype of stored parameters; bf16 stands still at lr 1e-6"
    )
    optimizer: OptimizerConfig = field(OptimizerConfig(), "optimizer")
    scheduler: SchedulerConfig = field(SchedulerConfig(), "learning-rate schedule, counted in optimizer steps")
    logprob_chunk_tokens: int = field(2048, "tokens per chunk of the fp32 softmax, so that [T, V] never exists", ge=1)
