"""The memory of each kind of rank in each phase of a step: the parts that are there, and their bytes. A phase needs the
sum of its parts; a device needs the largest phase."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.plan.decisions import (
    CACHE_SHARE,
    CHUNK_LOGITS,
    CHUNK_LOGITS_ON_CPU,
    DEVICE_BUCKET_BYTES,
    HOST_BUCKET_BYTES,
    PACK_BYTES,
    PIECE_BYTES,
    SAVED_LOGITS_ON_CPU,
    SLOPES,
    STEP_BYTES,
    VLLM_CPU_CACHE_BYTES,
    ModelNumbers,
    recomputed_every,
)
from meshrl.plan.disk_use import size_text
from meshrl.plan.sizes import micro_batches, page_tokens, room_for
from meshrl.plan.traffic import Shape, Work, sent_bytes

PHASES = ("load", "sync", "rollout", "annotate", "train", "optimizer", "save")
MEASURED = {"optim": "optimizer", "checkpoint": "save", **{phase: phase for phase in PHASES[1:5]}}
"""Phase that ranks measure -> that of a plan."""
CACHE, LIBRARIES = "sampler's cache", "libraries"
CPU_LIBRARIES = 350 << 20  # of a rank after it has imported torch and Transformers
DEVICE_LIBRARIES = 1 << 30  # of an accelerator: its context, kernels and the buffers of the collectives
ERROR = 0.07  # of a plan, against measured peaks (docs/perf/memory.md)
PREFILL_TOKENS = 4096  # tokens of new contexts that the embedded engine computes in one step, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of a micro-batch's activations on a rank, by a trace. hidden: of the input of a block. stored: by the
    forward passes of all blocks, for their backward passes. forward, backward: that exist in those of one block at one
    time, at most, the second with what its forward pass stored."""

    hidden: int
    stored: int
    forward: int
    backward: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMemory:
    """Bytes of a model's tensors. weights: of the full model in its compute dtype. trained: of all trained parameters
    in the dtype of the masters. masters, gradients, moments, reference: of the train rank with the largest shards.
    blocks, block, root: in the compute dtype, what a rank of tp has of all blocks, of the largest one or group of
    FSDP2, and of what is in no other group; head: of the head alone. own_embedding, own_head: that are groups of
    their own. groups: of FSDP2, as text. token: of the keys and values of a token; None if they are not those of
    softmax attention. flops: to train a token of the longest row; None = unknown. activations: None = not traced, for
    the reason in `untraced`. shape: None = with adapters, of which no traffic is planned."""

    weights: int
    trained: int
    masters: int
    gradients: int
    moments: int
    reference: int
    blocks: int
    block: int
    root: int
    head: int
    own_embedding: int = 0
    own_head: int = 0
    groups: str = ""
    token: int | None
    flops: float | None = None
    activations: Activations | None = None
    untraced: str = ""
    shape: Shape | None = None


@dataclass(slots=True)
class RankMemory:
    """Of one kind of rank. phases: that it has. device, host: part -> phase -> bytes, of its device and of its
    machine's memory; a CPU's ranks have one memory. unknown: parts whose size is not known, with the reason. notes: how
    a part's size is made."""

    what: str
    phases: tuple[str, ...] = PHASES
    device: dict[str, dict[str, int]] = field(default_factory=dict)
    host: dict[str, dict[str, int]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, part: str, size: int, phases: Collection[str] | None = None, on_host: bool = False) -> None:
        """phases: None = all that the rank has."""
        phases = self.phases if phases is None else phases
        if size > 0 and phases:
            own = (self.host if on_host else self.device).setdefault(part, {})
            own |= {phase: own.get(phase, 0) + size for phase in phases}

    def total(self, phase: str, without: Collection[str] = ()) -> int:
        """without: parts."""
        return sum(own.get(phase, 0) for part, own in self.device.items() if part not in without)

    @property
    def least(self) -> int:
        """Of the largest phase, without the libraries and the cache of an embedded engine, which takes what is left."""
        return max(self.total(phase, (LIBRARIES, CACHE)) for phase in self.phases)

    @property
    def peak(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    def largest(self, phase: str) -> tuple[str, int]:
        """The largest part of a phase."""
        return max(((part, own.get(phase, 0)) for part, own in self.device.items()), key=lambda each: each[1])


def fits(rank: RankMemory, device_bytes: int) -> bool:
    return rank.total(rank.peak) * (1 + ERROR) <= device_bytes


def verdict(rank: RankMemory, device_bytes: int) -> str:
    """Whether it fits into a device, and what needs most."""
    need, (part, size) = rank.total(rank.peak), rank.largest(rank.peak)
    word = (
        "fits" if fits(rank, device_bytes) else "may not fit" if need * (1 - ERROR) <= device_bytes else "does not fit"
    )
    left = device_bytes - need
    margin = f"{size_text(left)} are left" if left >= 0 else f"{size_text(-left)} too much"
    return (
        f"{word}: {rank.peak} needs {size_text(need)} of {size_text(device_bytes)}, {margin}; most of it: {part} "
        f"{size_text(size)}" + (f"; not counted, as unknown: {', '.join(rank.unknown)}" if rank.unknown else "")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """What the bytes follow from. config: with the decided values. tokens: of a micro-batch, on each train rank.
    is_single: whether an optimizer step is one micro-batch. device: a type; None = an accelerator. device_bytes: of its
    memory; None = not known."""

    config: RunConfig | SftRunConfig
    model: ModelNumbers
    memory: ModelMemory
    num_train_ranks: int
    tokens: int
    is_single: bool
    has_reference: bool
    device: str | None
    device_bytes: int | None

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


def rank_memory(job: PlannedRun) -> tuple[RankMemory, ...]:
    """Of a train rank, which also samples if samplers are colocated, and of a rank that samples alone."""
    config, ranks = job.config, [_train_rank(job)]
    if isinstance(config, RunConfig) and config.cluster.num_rollout_ranks:
        ranks.append(RankMemory("rank that samples", ("load", "sync", "rollout")))
    for rank in ranks:
        rank.add(LIBRARIES, CPU_LIBRARIES if job.on_cpu else DEVICE_LIBRARIES)
    if isinstance(config, RunConfig):
        _add_sampler(ranks[-1], job, config, is_alone=len(ranks) > 1)
    for rank in ranks:
        if job.on_cpu:
            for part, sizes in rank.host.items():
                rank.device[part] = {p: sizes.get(p, 0) + rank.device.get(part, {}).get(p, 0) for p in rank.phases}
            rank.host = {}
    return tuple(ranks)


def traffic(job: PlannedRun) -> dict[str, float]:
    """By axis of the mesh, the bytes that a train rank sends in an optimizer step, at most. {} = unknown."""
    train, width = job.config.train, _width(job.config.model.dtype)
    mesh, (tokens, number) = train.mesh_shape(job.num_train_ranks), micro_batches(job.config, job.num_train_ranks)
    if job.memory.shape is None or tokens is None or number is None:
        return {}
    work = [Work(tokens=job.tokens * mesh[2], scored=job.tokens)] * number
    return sent_bytes(job.memory.shape, work, mesh, width, _recomputed(job))


def _recomputed(job: PlannedRun) -> int:
    """Blocks of which only the input is stored."""
    every = recomputed_every(job.config.train.activation_checkpointing)
    return ceil(job.model.num_layers / every) if every else 0


def _train_rank(job: PlannedRun) -> RankMemory:
    config, memory, train = job.config, job.memory, job.config.train
    is_rl = isinstance(config, RunConfig)
    phases = PHASES if is_rl else ("load", "train", "optimizer", "save")
    rank = RankMemory("train rank" if is_rl else "rank", phases)
    leaves = is_rl and not job.on_cpu and train.param_offload and not config.cluster.num_rollout_ranks
    stays = [phase for phase in phases if not (leaves and phase == "rollout")]
    shared = 0 if _second_copy(job) else memory.masters - memory.gradients
    rank.add("masters", shared, phases)
    for part, size in (("masters", memory.masters - shared), ("reference", memory.reference * job.has_reference)):
        rank.add(part, size, stays)
        rank.add(part, size, ["rollout"] if leaves else [], on_host=True)
    _, shards, ulysses, tp = train.mesh_shape(job.num_train_ranks)
    if shards * ulysses * tp > 1:
        rank.notes["masters"] = f"sharded over {shards * ulysses}" + (f" x tp {tp}" if tp > 1 else "")
    if shared:
        rank.notes["masters"] = "the sampler computes with the frozen ones, too, so they never leave"
    rank.notes["activations"] = f"{job.tokens:,} tokens"
    moments, offloads = memory.moments, train.optimizer_offload and not job.on_cpu
    if train.optimizer.kind == "adamw_8bit" or train.master_dtype == "bfloat16":
        rank.add("optimizer step", STEP_BYTES, ["optimizer"])
    rank.add("moments", min(moments, 2 * PIECE_BYTES) if offloads else 0, ["optimizer"])
    rank.add("moments", moments, phases if offloads else phases[1:], on_host=offloads)
    rank.add("gradients", memory.gradients, ["optimizer"] if job.is_single else ["train", "optimizer"])
    _add_forward_and_backward(rank, job)
    saved = memory.gradients if config.model.lora.enabled else memory.masters  # of adapters alone, as checkpoints are
    rank.add("staged checkpoint", saved + moments, ["save"], on_host=True)
    return rank


def _add_forward_and_backward(rank: RankMemory, job: PlannedRun) -> None:
    """Blocks in use: gathered, or cast to the compute dtype. Of a backward pass the gradients of one block exist in the
    compute dtype, and in fp32 while they are reduced. The logits of a chunk, and what exists within one block, do not
    exist at one time; neither do all activations and, in a single micro-batch, all gradients. A head that is a group of
    its own exists with its logits; as it is gathered, and as its gradients are reduced, twice; and these until the next
    block's are."""
    config, memory, train = job.config, job.memory, job.config.train
    width = _width(config.model.dtype)
    is_rl, lora = isinstance(config, RunConfig), config.model.lora.enabled
    replicas, shards, ulysses, tp = train.mesh_shape(job.num_train_ranks)
    is_sharded = replicas * shards * ulysses > 1
    is_copied = is_sharded or not (lora or config.model.dtype == train.master_dtype)
    keeps_all = train.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD")
    num_layers, recomputed = job.model.num_layers, _recomputed(job)
    if not is_sharded:
        # Else the copies are made again; some blocks count as all.
        keeps_all = train.activation_checkpointing != "selective" and recomputed < num_layers
    own_head, reduced, head = 0 if keeps_all else memory.own_head, 0, _head_bytes(job, width, tp)
    if is_copied:
        one = memory.block * (1 + train.fsdp_prefetch * is_sharded)
        rank.add("blocks in use", one, ["annotate"] if is_rl else [])
        rank.add("blocks in use", memory.blocks if keeps_all else one, ["train"])
        root = memory.root + (memory.own_embedding + memory.own_head) * keeps_all
        rank.add("embedding, head", root + own_head, ["annotate"] if is_rl else [])
        rank.add("embedding, head", root, ["train"])
        rank.notes["blocks in use"] = memory.groups
    if not lora and is_copied:
        reduced = memory.block + (own_head * 4 // width if own_head else memory.head)
        reduced += memory.block * 4 // width if is_sharded else 0
        rank.add("gradients in use", reduced, ["train"])
    if own_head:  # then there is one block, and none of these gradients
        head = max(2 * own_head + head, 0 if lora else own_head + own_head * 4 // width) - memory.block - reduced
    if memory.activations is None:
        rank.unknown["activations"] = memory.untraced
        return
    held = memory.activations
    parts = 2 * (tp - 1) * held.hidden // tp  # the input of attention and of the MLP, of all ranks' tokens
    stored = (held.stored // tp + parts * num_layers) * (num_layers - recomputed) // num_layers
    if recomputed:  # the inputs of blocks, of the last norm, also in fp32, and of the head
        stored += (recomputed + 3) * held.hidden // tp
    if is_rl:
        logits = min(job.tokens * ceil(job.model.vocab_size / tp), CHUNK_LOGITS_ON_CPU) * 4 * job.on_cpu
        at_head = logits + own_head - 2 * memory.block * bool(own_head)  # the blocks are freed, and it is copied
        rank.add("within a block", max(at_head, held.forward // tp + parts + 2 * held.hidden // tp), ["annotate"])
    own = 0 if recomputed else held.stored // (tp * num_layers)  # of the block, counted in all activations
    within = max(head, held.backward // tp + parts - own)
    rank.add("within a block", within, ["train"])
    rank.add("activations", stored, ["train"])
    if job.is_single:  # its gradients take the place of its activations, and of the copies of blocks
        freed = stored + (memory.blocks if is_copied and keeps_all else 0)
        rank.add("gradients", max(0, memory.gradients - freed), ["train"])


def _head_bytes(job: PlannedRun, width: int, tp: int) -> int:
    """That exist at one time from the final hidden states to the gradient of the head."""
    vocab, chunk = ceil(job.model.vocab_size / tp), job.config.train.logprob_chunk_tokens
    logits = job.tokens * vocab
    if not job.on_cpu:
        logits = min(logits, chunk * vocab if chunk else CHUNK_LOGITS)
        return logits * 3 * 4 if width == 4 else 2 * min(logits, SLOPES)
    logits = min(logits, chunk * vocab if chunk else SAVED_LOGITS_ON_CPU)  # of answers, so many at most
    return logits * 4 if width == 4 else logits * 6 + 2 * job.memory.head  # copies in 16 bits, and of the head in 32


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _second_copy(job: PlannedRun) -> str:
    """As `RolloutConfig.second_copy`."""
    config = job.config
    if not isinstance(config, RunConfig):
        return "nothing samples"
    return config.rollout.second_copy(config.model.lora, job.num_train_ranks, config.cluster.num_rollout_ranks)


def _add_sampler(rank: RankMemory, job: PlannedRun, config: RunConfig, is_alone: bool) -> None:
    """A server that takes a share of the device has its weights and its cache in it."""
    rollout, memory = config.rollout, job.memory
    if not rollout.uses_device:
        return
    sampler = sampler_memory(config, memory, page_tokens(job.device or "accelerator"))
    releases = not is_alone and rollout.releases(on_accelerators=not job.on_cpu)
    others = ["load"] * (not releases) + ["annotate", "train", "optimizer", "save"] * (not is_alone and not releases)
    bucket = rollout.sync_bucket_bytes or (HOST_BUCKET_BYTES if job.on_cpu else DEVICE_BUCKET_BYTES)
    _, shards, ulysses, tp = config.train.mesh_shape(job.num_train_ranks)
    in_place = rollout.engine == "embedded" and not is_alone and shards * ulysses * tp == 1
    rank.add("sync windows", 2 * min(bucket, sampler.weights) * (not in_place), ["sync"])
    lora, second_copy = config.model.lora, _second_copy(job)
    takes_adapters = lora.enabled and rollout.takes_adapters(lora)
    as_sent = _width(config.model.dtype) / _width(config.train.master_dtype)  # bytes of a byte of trained masters
    if rollout.sync_mode == "delta" and not is_alone:
        merged = memory.masters - memory.gradients if lora.enabled else int(memory.masters * as_sent)
        rank.add("weights sent last", int(memory.gradients * as_sent) if takes_adapters else merged)
    in_use = ["sync", "rollout", *others]
    share = rollout.vllm.gpu_memory_utilization if rollout.engine == "vllm" else rollout.sglang.mem_fraction_static
    if rollout.engine == "embedded":
        rank.add("sampler's weights", int(memory.trained * as_sent) * takes_adapters, in_use)
        rank.add("sampler's weights", sampler.weights * bool(second_copy), in_use)
        if lora.enabled:
            note = f"base and adapters: {second_copy}" if second_copy else "adapters; the base is among the masters"
            rank.notes["sampler's weights"] = note
        of_head = 1 if _width(config.model.dtype) == 4 else 4  # a copy in fp32, and that prepacked
        packed = memory.blocks * (memory.blocks <= PACK_BYTES) + memory.head * of_head
        rank.add("sampler's prepacked weights", packed * job.on_cpu, ["rollout"])
        logits = 3 * max(sampler.rows, 1) * job.model.vocab_size * 4
        new = sampler.rows // max(1, config.loop.samples_per_prompt) * config.data.max_prompt_tokens
        of_tokens = 0 if memory.activations is None else memory.activations.forward / job.tokens
        contexts = int(of_tokens * min(PREFILL_TOKENS, max(new, config.data.max_prompt_tokens)))
        rank.add("sampler's step", max(logits, contexts), ["rollout"])
        needed, bound = sampler.tokens * (sampler.token or 0), rollout.embedded.kv_cache_bytes
        if bound is None and job.device_bytes is not None and not job.on_cpu:  # a CPU's cache has no limit
            bound = max(0, int(CACHE_SHARE * (job.device_bytes - rank.total("rollout"))))
        bound = needed if bound is None else max(bound, needed // max(1, sampler.rows))  # one row, at least
        rank.add(CACHE, min(needed, bound), ["rollout"])
        size = f"{sampler.rows} rows, together {sampler.tokens:,} tokens x {sampler.token:,} bytes" if needed else ""
        rank.notes[CACHE] = f"{bound / needed:.0%} of {size}; rows wait when it is full" if bound < needed else size
        if not needed:
            states = "its layers pass states on, or the sizes of their heads are unknown"
            rank.unknown[CACHE] = "rollout.max_context_tokens is not set" if sampler.token else states
    elif rollout.engine == "vllm" and (rollout.vllm.kv_cache_bytes is not None or job.on_cpu):
        rank.add("sampler's weights", sampler.weights, in_use)
        rank.add(CACHE, rollout.vllm.kv_cache_bytes or VLLM_CPU_CACHE_BYTES, in_use)
    elif job.device_bytes is not None:
        row = (sampler.token or 0) * (rollout.max_context_tokens or 0)
        rank.add("server", max(int(share * job.device_bytes), sampler.weights + row), in_use)
        rank.notes["server"] = f"{share:.0%} of the device, or its weights and one row if they are more"
    else:
        rank.unknown["server"] = f"it takes {share:.0%} of the device"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerMemory:
    """Bytes on each device of a sampler. token: of the KV cache for a token; None = unknown. rows: that it runs at one
    time, at most. tokens: for which the embedded engine's cache has memory then; 0 = a server decides."""

    weights: int
    token: int | None
    rows: int = 0
    tokens: int = 0


def sampler_memory(config: RunConfig, memory: ModelMemory, page: int) -> SamplerMemory:
    """page: tokens of a page."""
    rollout, tp = config.rollout, config.rollout.tp_size
    weights, token = memory.weights // tp, None if memory.token is None else memory.token // tp
    longest = rollout.max_context_tokens
    if rollout.engine != "embedded" or longest is None:
        return SamplerMemory(weights=weights, token=token)
    if config.agent.kind == "single_turn":
        answer = max(rollout.sampling.max_new_tokens, config.eval_sampling.max_new_tokens)
        longest = min(longest, config.data.max_prompt_tokens + answer)
    rows = max(_requests(config))
    return SamplerMemory(weights=weights, token=token, rows=rows, tokens=room_for(rows, longest, page))


def _requests(config: RunConfig) -> tuple[int, int]:
    """The largest numbers of requests that a sampler runs at a time: in a step, and in an evaluation."""
    loop, data, most = config.loop, config.data, config.rollout.max_running_requests
    in_step = most if loop.kind == "fully_async" else min(most, loop.prompts_per_step * loop.samples_per_prompt)
    if not data.is_evaluated:
        return in_step, 0
    path, rows = Path(data.eval_path or ""), data.eval_limit or most
    if path.suffix == ".jsonl":
        with suppress(OSError), path.open("rb") as lines:
            rows = min(rows, sum(1 for _ in lines))
    samples = max(config.of_eval_set(name).loop.eval_samples for name in ("", *data.eval_sets))
    return in_step, min(most, rows * samples)
