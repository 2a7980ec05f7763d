"""The keys of train.* and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from meshrl.config.base import Slice, field
from meshrl.config.source import Problem

if TYPE_CHECKING:
    from meshrl.config.check import Case


class TrainMeshConfig(Slice):
    """Ranks along each axis of the DeviceMesh; their product is cluster.num_train_ranks."""

    dp_replicate: int = field(1, "copies of the sharded model; 2 or more with HYBRID_SHARD", ge=1)
    dp_shard: int = field(-1, "ranks that share one copy of the model's state; -1 = all that remain", ge=-1)
    ulysses: int = field(1, "ranks over which the tokens of a row are split (sequence parallelism)", ge=1)
    tp: int = field(1, "ranks over which each matrix is split (tensor parallelism)", ge=1)


class OptimizerConfig(Slice):
    kind: Literal["adamw"] = field(
        "adamw",
        "Adam with decoupled weight decay, which applies to matrices only; the usual choice in RL of language models",
    )
    lr: float = field(1e-6, "peak learning rate; 1e-6 is the usual full fine-tuning RL value", gt=0)
    betas: tuple[float, float] = field(
        (0.9, 0.95),
        "decay of the first and second moment, each below 1; 0.95 forgets old gradient scales sooner than 0.999",
    )
    eps: float = field(1e-8, "added to the square root of the second moment", gt=0)
    weight_decay: float = field(
        0.0,
        "each optimizer step subtracts weight_decay x lr x value from matrices; 0, because RL stays near its start "
        "without it",
        ge=0,
    )
    clip: float = field(1.0, "limit of the global gradient norm; larger gradients are scaled down to it; 0 = off", ge=0)


class SchedulerConfig(Slice):
    kind: Literal["constant", "linear", "cosine"] = field(
        "constant",
        "learning rate after warm-up: constant, or falling to min_lr_ratio of its peak at the end",
    )
    warmup_steps: int = field(
        0, "optimizer steps in which lr rises to its peak; fewer than the run's optimizer steps", ge=0
    )
    min_lr_ratio: float = field(
        0.0, "learning rate at the end of linear and cosine, as a fraction of the peak", ge=0, le=1
    )


class TrainConfig(Slice):
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = field(
        "FULL_SHARD",
        "FULL_SHARD shards parameters, gradients and optimizer state; SHARD_GRAD_OP keeps parameters gathered after "
        "forward; HYBRID_SHARD has dp_replicate copies of the sharded model; NO_SHARD has the full model in every rank",
    )
    activation_checkpointing: bool = field(
        True, "recompute each block's activations in backward: far less memory for about 30 % more compute"
    )
    mesh: TrainMeshConfig = field(TrainMeshConfig(), "ranks along each axis of the DeviceMesh")
    tensor_model_parallel_size: int | None = field(
        None, "another name of train.mesh.tp; if both are given they must agree", ge=1
    )
    max_tokens_per_microbatch: int = field(
        16384,
        "tokens packed into one micro-batch of one rank; a lower value needs less memory and gives the same results",
        ge=1,
    )
    share_prompts: bool = field(
        True, "compute a group's prompt once per micro-batch; the gradient is the same; use false only for comparisons"
    )
    updates_per_step: int = field(
        1,
        "optimizer steps per rollout step; 1 = on-policy; with more, all but the first train on samples of older "
        "weights; must divide loop.prompts_per_step",
        ge=1,
    )
    master_dtype: Literal["float32", "bfloat16"] = field(
        "float32",
        "dtype of the stored parameters and optimizer moments; bfloat16 loses the small steps of lr 1e-6 in rounding",
    )
    optimizer: OptimizerConfig = field(OptimizerConfig(), "the optimizer")
    scheduler: SchedulerConfig = field(SchedulerConfig(), "the learning rate over the run, counted in optimizer steps")
    logprob_chunk_tokens: int = field(
        2048, "tokens whose logits exist at one time; a lower value needs less memory and gives the same results", ge=1
    )

    def data_ranks(self, num_train_ranks: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) with -1 replaced by its size; NO_SHARD makes every rank a replica. Their product may
        differ from num_train_ranks."""
        mesh = self.mesh
        if self.sharding_strategy == "NO_SHARD":
            replicas = num_train_ranks if mesh.dp_replicate == 1 else mesh.dp_replicate
            return replicas, 1 if mesh.dp_shard == -1 else mesh.dp_shard
        if mesh.dp_shard == -1:
            return mesh.dp_replicate, max(1, num_train_ranks // mesh.dp_replicate)
        return mesh.dp_replicate, mesh.dp_shard


def train_problems(case: Case) -> Iterator[Problem]:
    config = case.config
    yield from _mesh(config.train, config.cluster.num_train_ranks)
    if not all(0 <= beta < 1 for beta in config.train.optimizer.betas):
        yield Problem(("train.optimizer.betas",), "both must be at least 0 and below 1.")
    if config.train.scheduler.warmup_steps >= config.num_updates:
        yield Problem(
            ("train.scheduler.warmup_steps", config.NUM_STEPS_KEY),
            f"the run has {config.num_updates} optimizer steps, so the learning rate would never reach its peak. Warm "
            "up for fewer.",
        )


def _mesh(train: TrainConfig, ranks: int) -> Iterator[Problem]:
    strategy = train.sharding_strategy
    keys = ("train.sharding_strategy", "train.mesh.dp_replicate", "train.mesh.dp_shard", "cluster.num_train_ranks")
    if train.mesh.dp_shard != -1 and train.mesh.dp_shard < 1:
        yield Problem(keys[2:3], "must be a number of ranks >= 1, or -1 for all that remain.")
        return
    replicate, shard = train.data_ranks(ranks)
    if strategy == "HYBRID_SHARD" and replicate == 1:
        yield Problem(
            keys[:2], "HYBRID_SHARD copies a sharded model; with one copy use FULL_SHARD, else dp_replicate >= 2."
        )
    elif strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and replicate > 1:
        yield Problem(keys[:2], f"{strategy} shards over all ranks; for {replicate} sharded copies use HYBRID_SHARD.")
    elif strategy == "NO_SHARD" and shard != 1:
        yield Problem((keys[0], keys[2]), "NO_SHARD keeps the full model in each rank: dp_shard must be 1 or -1.")
    elif replicate * shard != ranks:
        yield Problem(
            keys[1:],
            f"dp_replicate {replicate} x dp_shard {shard} = {replicate * shard} ranks, but num_train_ranks is {ranks}. "
            "Leave dp_shard at -1, or make the product equal.",
        )
