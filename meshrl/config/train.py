from typing import Literal

from meshrl.config.base import Slice, field


class TrainMeshConfig(Slice):
    """Ranks along each axis of the DeviceMesh; their product is cluster.num_train_ranks."""

    dp_replicate: int = field(1, "copies of the sharded model; more than 1 with HYBRID_SHARD", ge=1)
    dp_shard: int = field(-1, "ranks that share one copy of the model's state; -1 = all that remain", ge=-1)
    ulysses: int = field(1, "ranks that split a row's tokens among them (sequence parallelism)", ge=1)
    tp: int = field(1, "ranks that split each matrix among them (tensor parallelism)", ge=1)


class OptimizerConfig(Slice):
    kind: Literal["adamw"] = field(
        "adamw", "Adam with decoupled weight decay, on matrices only; what RL of language models uses"
    )
    lr: float = field(1e-6, "peak learning rate; 1e-6 is the usual full fine-tuning RL value", gt=0)
    betas: tuple[float, float] = field(
        (0.9, 0.95),
        "decay of the first and second moment, each below 1; 0.95 forgets old gradient scales sooner than 0.999",
    )
    eps: float = field(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = field(
        0.0, "share of a matrix taken off per optimizer step, times lr; 0: RL stays near its start anyway", ge=0
    )
    clip: float = field(1.0, "largest global gradient norm; a larger gradient is scaled down to it; 0 = off", ge=0)


class SchedulerConfig(Slice):
    kind: Literal["constant", "linear", "cosine"] = field(
        "constant", "the learning rate after warm-up: it stays, or falls to min_lr_ratio by the end of the run"
    )
    warmup_steps: int = field(
        0, "optimizer steps in which lr rises to its peak; below the run's number of optimizer steps", ge=0
    )
    min_lr_ratio: float = field(0.0, "lr at the end of linear and cosine as a share of the peak", ge=0, le=1)


class TrainConfig(Slice):
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = field(
        "FULL_SHARD",
        "FULL_SHARD splits parameters, gradients, optimizer state; SHARD_GRAD_OP keeps parameters gathered after "
        "forward; HYBRID_SHARD copies the sharded model dp_replicate times; NO_SHARD copies it to every rank",
    )
    activation_checkpointing: bool = field(
        True, "recompute each block's activations in backward: far less memory for about 30 % more compute"
    )
    mesh: TrainMeshConfig = field(TrainMeshConfig(), "the DeviceMesh's axes")
    tensor_model_parallel_size: int | None = field(
        None, "another name of train.mesh.tp; if both are given they must agree", ge=1
    )
    max_tokens_per_microbatch: int = field(
        16384,
        "tokens packed into one micro-batch of one rank; lower it when memory runs out, results stay the same",
        ge=1,
    )
    share_prompts: bool = field(
        True, "compute a group's prompt once per micro-batch, with the same gradient; off only to compare"
    )
    updates_per_step: int = field(
        1,
        "optimizer steps per rollout step; 1 is on-policy, more reuse old samples; must divide loop.prompts_per_step",
        ge=1,
    )
    master_dtype: Literal["float32", "bfloat16"] = field(
        "float32", "dtype of the stored parameters and moments; bfloat16 loses the small steps of lr 1e-6 in rounding"
    )
    optimizer: OptimizerConfig = field(OptimizerConfig(), "the optimizer")
    scheduler: SchedulerConfig = field(SchedulerConfig(), "the learning rate over the run, counted in optimizer steps")
    logprob_chunk_tokens: int = field(
        2048, "tokens whose logits exist at one time; smaller saves memory, results stay the same", ge=1
    )
