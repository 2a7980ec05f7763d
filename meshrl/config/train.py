"""The keys of train.* and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from meshrl.config.base import COLOCATED, OF_SAMPLING, NotInSft, Slice, Unless
from meshrl.config.case import Case, Problem
from meshrl.core.errors import ConfigError

MOST_TOKENS = 16384  # of a micro-batch, unless the config gives more


class TrainMeshConfig(Slice):
    """Ranks along each axis of the DeviceMesh; their product is cluster.num_train_ranks."""

    dp_replicate: int = Field(1, ge=1)
    """copies of the sharded model; 2 or more with HYBRID_SHARD"""
    dp_shard: int = Field(-1, ge=-1)
    """ranks that share one copy of the model's state; -1 = all that remain"""
    ulysses: int = Field(1, ge=1)
    """ranks over which the tokens of packed rows are split, and in attention the heads (sequence parallelism), for long
    rows; the model's state is sharded over them, too"""
    tp: int = Field(1, ge=1)
    """ranks over which each matrix is split (tensor parallelism), for models whose layers are too large for one rank;
    best within one machine"""


class OptimizerConfig(Slice):
    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """Adam with decoupled weight decay, which applies to matrices only; the usual choice in RL of language models.
    adamw_8bit stores its moments in 8 bits with a scale for each 256 elements of a row: 2.03 bytes a parameter in
    place of 8. Vectors, tensors below 4,096 elements and rows below 64 keep theirs; not with tp"""
    lr: float | None = Field(None, gt=0)
    """peak learning rate; null = 1e-6 in RL and 1e-5 in SFT, which are usual for full fine-tuning, and ten times this
    with model.lora"""
    betas: tuple[float, float] = (0.9, 0.95)
    """decay of the first and second moment, each below 1; 0.95 forgets old gradient scales sooner than 0.999"""
    eps: float = Field(1e-8, gt=0)
    """added to the square root of the second moment"""
    weight_decay: float = Field(0.0, ge=0)
    """each optimizer step subtracts weight_decay x lr x value from matrices; 0, because in RL the weights stay
    near their initial values without it"""
    clip: float = Field(1.0, ge=0)
    """limit of the global gradient norm; larger gradients are scaled down to it; 0 = off"""


class SchedulerConfig(Slice):
    kind: Literal["constant", "linear", "cosine"] = "constant"
    """learning rate after warm-up: constant, or falling to min_lr_ratio of its peak at the end"""
    warmup_steps: int = Field(0, ge=0)
    """optimizer steps in which lr rises to its peak; fewer than the run's optimizer steps"""
    min_lr_ratio: Annotated[float, Unless("train.scheduler.kind", "constant")] = Field(0.0, ge=0, le=1)
    """learning rate at the end of linear and cosine, as a fraction of the peak"""


class TrainConfig(Slice):
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    """FULL_SHARD shards parameters, gradients and optimizer state; SHARD_GRAD_OP keeps parameters gathered after
    forward; HYBRID_SHARD has dp_replicate copies of the sharded model; NO_SHARD has the full model in every rank. With
    one rank, or ranks of tp alone, FSDP2 has nothing to shard, whatever the value"""
    fsdp_group_bytes: int = Field(1 << 25, ge=0)
    """FSDP2 gathers neighbouring blocks of the language model together as long as they have at most this many bytes in
    model.dtype, which makes fewer collectives of small layers; embedding and head are gathered for themselves, and
    freed after use, if they have more and are not tied; 0 = each block for itself. Above 32 MiB, collectives gain
    little, and ranks need the memory of two larger groups"""
    fsdp_prefetch: int = Field(1, ge=1, le=64)
    """groups of blocks that FSDP2 gathers ahead of the one that computes, forwards and backwards. More than 1 hides
    slow networks behind compute, for the memory of one group each"""
    activation_checkpointing: Literal[
        True, False, "block", "every_2", "every_3", "every_4", "submodule", "selective"
    ] = True
    """which activations of a block are recomputed in backward instead of stored: true or block = all but its input,
    for about a fourth to a third more compute; every_2 to every_4 = the same in one of so many blocks; submodule =
    those of its MLP or experts, and of its norms; selective = all but matrix products and the output of attention,
    for 1 % more compute at most; false = none. Results are equal to the bit. docs/perf/README.md has the share of
    memory that each saves"""
    torch_compile: bool = False
    """compile the decoder blocks of trained and reference model by torch.compile, once for packs of any length; results
    are equal within rounding, and the first steps take minutes longer. Attention, head and embedded samplers are not
    compiled. Needs a C++ compiler on a CPU, and Triton on a GPU; not for mixtures of experts and layers with a state"""
    full_determinism: bool = False
    """on GPUs, train with kernels whose gradients are the same to the bit each time; an operation that has none is an
    error. On CPUs gradients always are. Samplers on GPUs are not covered: their logprobs depend on which rows are
    computed together"""
    mesh: TrainMeshConfig = TrainMeshConfig()
    """ranks along each axis of the DeviceMesh"""
    tensor_model_parallel_size: int | None = Field(None, ge=1)
    """another name of train.mesh.tp; if both are given they must agree"""
    max_tokens_per_microbatch: int | None = Field(None, ge=1)
    """tokens of one micro-batch on one rank (ranks of ulysses share a micro-batch); a lower value needs less memory and
    gives the same results; null = as many as store about 4 GiB of activations by an estimate from the model's config,
    at most 16384"""
    share_prompts: Annotated[bool, NotInSft("rows of SFT share no prompts")] = True
    """compute a group's prompt once per micro-batch; the gradient is the same; use false only for comparisons. Layers
    with a state, such as linear attention, compute it for each answer all the same"""
    updates_per_step: Annotated[int, NotInSft("an SFT step is one optimizer step")] = Field(1, ge=1)
    """optimizer steps per rollout step; 1 = on-policy; with more, all but the first train on samples of older weights;
    must divide loop.prompts_per_step"""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the stored parameters, gradients and moments. bfloat16 takes half the memory, and is rounded up or down
    at random, so that the small steps of lr 1e-6 are kept on average; the weights are noisier"""
    optimizer_offload: bool = False
    """AdamW's moments are in host memory. The optimizer step copies them to the device and back in pieces of 256 MiB,
    two at a time, and takes longer by the time of these copies; for accelerators: on a CPU nothing is moved"""
    param_offload: Annotated[bool, OF_SAMPLING, COLOCATED] = False
    """parameters, also those of the reference model, are in host memory while colocated samplers work; for
    accelerators: on a CPU nothing is moved. With LoRA on one train rank with an embedded sampler, frozen weights stay,
    because both compute with the same tensors"""
    optimizer: OptimizerConfig = OptimizerConfig()
    """the optimizer"""
    scheduler: SchedulerConfig = SchedulerConfig()
    """the learning rate over the run, counted in optimizer steps"""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """weight of the load-balance loss of a mixture of experts, as in Switch Transformers; its counts are those of all
    tokens of the optimizer step, so that it does not depend on micro-batches and ranks; they need a second forward
    pass, about a third more compute; 0 = off, also where the model's config.json has a value"""
    logprob_chunk_tokens: int | None = Field(None, ge=1)
    """tokens whose logits exist at one time; a lower value gives the same results and needs less memory, except for a
    head that is trained in bfloat16 on a CPU in micro-batches of fewer tokens than the hidden size; null = those of a
    micro-batch with at most 2^27 logits on a CPU, which are stored for the backward pass; otherwise as many as have
    2^25 logits on a CPU, 2^28 on a GPU, where about three fp32 copies of them exist"""

    @property
    def tp_key(self) -> str:
        """The one of the two keys that sets the axis tp."""
        return "train.mesh.tp" if self.tensor_model_parallel_size is None else "train.tensor_model_parallel_size"

    def mesh_shape(self, num_train_ranks: int) -> tuple[int, int, int, int]:
        """(dp_replicate, dp_shard, ulysses, tp) with -1 replaced by its size; NO_SHARD makes the ranks replicas. Their
        product may differ from num_train_ranks."""
        mesh, tp = self.mesh, self.tensor_model_parallel_size or self.mesh.tp
        replicas, shards, rest = mesh.dp_replicate, mesh.dp_shard, num_train_ranks // (mesh.ulysses * tp)
        if self.sharding_strategy == "NO_SHARD":
            replicas, shards = max(1, rest) if replicas == 1 else replicas, 1 if shards == -1 else shards
        return replicas, max(1, rest // replicas) if shards == -1 else shards, mesh.ulysses, tp


def train_problems(case: Case) -> Iterator[Problem]:
    config = case.config
    yield from _mesh(config.train, config.cluster.num_train_ranks)
    if config.model.lora.on_experts and config.train.mesh_shape(config.cluster.num_train_ranks)[3] > 1:
        text = "the adapters of experts are not cut. Use tp 1, and dp_shard for less memory, or leave experts out."
        yield Problem(("model.lora.targets", config.train.tp_key), text)
    mode = config.train.activation_checkpointing
    if config.train.torch_compile and mode in ("submodule", "selective"):
        text = (
            f"torch.compile can't compile blocks of which {mode} recomputes a part. Use true, which it can, or false."
        )
        yield Problem(("train.activation_checkpointing", "train.torch_compile"), text)
    if config.train.optimizer.kind == "adamw_8bit" and config.train.mesh_shape(config.cluster.num_train_ranks)[3] > 1:
        text = "tp cuts rows, whose elements share scales. Use adamw, or dp_shard in place of tp."
        yield Problem(("train.optimizer.kind", config.train.tp_key), text)
    if not all(0 <= beta < 1 for beta in config.train.optimizer.betas):
        yield Problem(("train.optimizer.betas",), "both must be at least 0 and below 1.")
    if case.purpose != "eval" and config.train.scheduler.warmup_steps >= config.num_updates:
        key, updates = "train.scheduler.warmup_steps", config.num_updates
        per_step = ("train.updates_per_step",) if "train.updates_per_step" in case.given else ()
        have = f"{updates} optimizer step{'' if updates == 1 else 's'}"
        reason = f"the run has {have}, so the learning rate would never reach its peak"
        note = f"{reason}; without a warm-up it starts there"
        keys = (key, config.NUM_STEPS_KEY, *per_step)
        yield Problem(keys, f"{reason}. Warm up for fewer.", void=(key,), reason=note)


def _mesh(train: TrainConfig, ranks: int) -> Iterator[Problem]:
    strategy = train.sharding_strategy
    keys = ("train.sharding_strategy", "train.mesh.dp_replicate", "train.mesh.dp_shard", "cluster.num_train_ranks")
    if train.mesh.dp_shard != -1 and train.mesh.dp_shard < 1:
        yield Problem(keys[2:3], "must be a number of ranks >= 1, or -1 for all that remain.")
        return
    replicate, shard, ulysses, tp = train.mesh_shape(ranks)
    if strategy == "HYBRID_SHARD" and replicate == 1:
        text = "HYBRID_SHARD copies a sharded model; with one copy use FULL_SHARD, else dp_replicate >= 2."
        yield Problem(keys[:2], text)
    elif strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and replicate > 1:
        text = f"{strategy} shards over all ranks. For {replicate} sharded copies use HYBRID_SHARD."
        yield Problem(keys[:2], text, void=keys[1:2])
    elif strategy == "NO_SHARD" and shard != 1:
        text = "NO_SHARD keeps the full model in each rank: dp_shard must be 1 or -1."
        yield Problem((keys[0], keys[2]), text, void=keys[2:3])
    elif strategy == "NO_SHARD" and ulysses > 1:
        text = "the ranks of ulysses share the model's state: use FULL_SHARD or HYBRID_SHARD with them."
        yield Problem((keys[0], "train.mesh.ulysses"), text)
    elif replicate * shard * ulysses * tp != ranks:
        sizes = {"dp_replicate": replicate, "dp_shard": shard, "ulysses": ulysses, "tp": tp}
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis.startswith("dp"))
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        text = f"{product} = {replicate * shard * ulysses * tp} ranks, but num_train_ranks is {ranks}. "
        text += f"Leave dp_shard at -1, and make the product of the others one of {divisors}."
        peers = [key for key, size in (("train.mesh.ulysses", ulysses), (train.tp_key, tp)) if size > 1]
        void = keys[1:2] if strategy == "NO_SHARD" else keys[2:3]
        yield Problem((*keys[1:3], *peers, keys[3]), text, void=void)


MESH_FOR_IMAGES = (
    "train.mesh.ulysses or train.mesh.tp is larger than 1, and a row has an image: ranks that share tokens would each "
    "need all images, and the tokens of an image could be on several of them. Set both to 1"
)


def require_mesh_for_images(train: TrainConfig) -> None:
    """Raises: ConfigError if ranks share tokens."""
    if train.mesh.ulysses > 1 or train.mesh.tp > 1:
        raise ConfigError(MESH_FOR_IMAGES)
