"""What a run decides where its config has null or auto: one table with the value and the reason of each such key.

A value follows from other keys, from the model's config.json, or from the machine. What depends on a device that is not
known yet, or on its free memory, is a rule: the rank that has the device applies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.train import MOST_TOKENS, TrainConfig
from meshrl.config.values import show

ACTIVATION_BYTES = 4 << 30  # of a micro-batch
FEWEST_TOKENS = 1024
AFTER_START_S = 60.0  # a rank's own loading, after its server has started
AUTO_SAVE_S = 600.0  # at most so much time is lost with a run's processes, if save_every_steps is null
CACHE_SHARE = 0.8  # of an accelerator's free memory; the rest is for logits and for the contexts that are computed
HOST_BUCKET_BYTES, DEVICE_BUCKET_BYTES = 64 << 20, 1 << 30  # on accelerators a transfer has to pay for more calls
CHUNK_LOGITS = 1 << 28  # logits that exist at one time on an accelerator, where about three copies of them exist
CHUNK_LOGITS_ON_CPU = 1 << 25
SLOPES = 1 << 27  # numbers of dL/dlogits in 16 bits that exist at one time: 256 MiB
VLLM_CPU_CACHE_BYTES = 1 << 30
PACK_BYTES = 1 << 30  # of blocks whose weights a CPU's sampler stores twice for speed; larger models do not
PIECE_BYTES = 256 << 20  # of both moments that optimizer_offload copies to a device at a time; two pieces are there
MOMENT_BLOCK = 256  # elements of a row that share the scale of a moment in 8 bits
STEP_BYTES = 40 << 20  # that an optimizer step with moments of 8 bits or bfloat16 masters makes at a time
SAVED_LOGITS_ON_CPU = 1 << 27  # that a forward may store for its backward pass: 512 MiB


def has_8bit_moments(shape: Sequence[int], num_elements: int) -> bool:
    """Whether adamw_8bit stores the moments of a parameter in 8 bits. shape: of it, or of a shard. Those of vectors,
    small tensors and short rows stay as they are: they are few, or scales would be as large."""
    return num_elements >= 4096 and len(shape) > 1 and shape[-1] >= 64


def moment_bytes(shard: Sequence[int], num_elements: int, element_bytes: int, is_8bit: bool) -> int:
    """Of both AdamW moments of a shard of this shape, of a parameter of num_elements of element_bytes."""
    size = prod(shard)
    if not (is_8bit and has_8bit_moments(shard, num_elements)):
        return 2 * size * element_bytes
    return 2 * (size + 4 * size // shard[-1] * -(-shard[-1] // MOMENT_BLOCK))


RULES = {  # null or auto of these keys is a rule that needs neither the model nor other keys
    "run.name": "the config file's name and the time",
    "run.date": "the time of the start",
    "model.attn_implementation": "by the device, noted at the start",
    "rollout.vllm.python": "the Python that runs meshrl",
    "rollout.vllm.kv_cache_bytes": f"gpu_memory_utilization; {VLLM_CPU_CACHE_BYTES >> 30} GiB on a CPU",
    "rollout.sglang.python": "the Python that runs meshrl",
    "rollout.endpoint.model": "the only model of the server",
    "rollout.endpoint.reload_url": "/update_weights_from_disk of the server",
    "rollout.endpoint.folder": "a temporary folder of this machine",
    "rollout.sync_transport": "broadcast on GPUs; shared memory or TCP on CPUs",
    "cluster.address": "RAY_ADDRESS, a cluster of this machine, or local",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """A value that the config leaves to the run. value: None where `reason` is a rule for the rank that has the device.
    is_of_machine: another machine may decide differently.

    Example: Decision("loop.max_staleness", 1, "loop.kind is one_step_off")
    """

    key: str
    value: Any
    reason: str
    is_of_machine: bool = False

    @property
    def shown(self) -> str:
        return self.reason if self.value is None else f"{show(self.value)}: {self.reason}"


_CACHE = f"{CACHE_SHARE:.0%} of free memory; no limit on a CPU"
CACHE_LIMIT = Decision("rollout.embedded.kv_cache_bytes", None, _CACHE)  # a sampler has the value when it has sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNumbers:
    """What plans read of a model's config.json. num_positions: the most tokens of a row; None = not stated.
    intermediate_size: None = as Transformers assumes, 4 x hidden_size."""

    num_positions: int | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    num_layers: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the ranks run. device: the type of their devices; None = not known before they start. is_launched: torchrun
    has started a process for each rank, perhaps on several machines."""

    device: str | None = None
    is_launched: bool = False


def decisions(
    config: RunConfig | SftRunConfig, model: ModelNumbers | None, machine: Machine, num_nodes: int
) -> Iterator[Decision]:
    """model: None = its config.json can't be read, so what follows from it is left out. num_nodes: machines."""
    for key, rule in RULES.items():
        if _value(config, key) in (None, "auto"):
            yield Decision(key, None, rule)
    train = config.train
    if train.optimizer.lr is None:
        with_lora = " with LoRA" if config.model.lora.enabled else ""
        reason = f"the default of {'SFT' if isinstance(config, SftRunConfig) else 'RL'}{with_lora}"
        yield Decision("train.optimizer.lr", config.peak_lr, reason)
    if train.tensor_model_parallel_size is None:
        yield Decision("train.tensor_model_parallel_size", train.mesh.tp, "train.mesh.tp")
    if train.max_tokens_per_microbatch is None and model is not None:
        yield micro_batch(config.model, train, model)
    if train.logprob_chunk_tokens is None:
        yield _logits_at_one_time(model, machine)
    for phase, seconds in deadlines_of(
        config.cluster, config.rollout if isinstance(config, RunConfig) else None
    ).items():
        if getattr(config.cluster.deadlines, phase) is None:
            is_of_server = seconds != config.cluster.timeout_s
            reason = "the start of its server, and loading" if is_of_server else "cluster.timeout_s"
            yield Decision(f"cluster.deadlines.{phase}", seconds, reason)
    if isinstance(config, SftRunConfig):
        if config.sft.save_every_steps is None:
            yield Decision("sft.save_every_steps", None, f"when the last state is {AUTO_SAVE_S:g} s old")
        return
    yield from _of_the_loop(config)
    yield from _of_the_samplers(config, model, machine, num_nodes)
    if config.algo.correction.kind == "auto":
        correction, on = config.algo.correction, machine.device
        rule = config.correction[1].removeprefix("auto: ")
        yield Decision("algo.correction.kind", None if on is None else correction.kind_on(on), rule, is_of_machine=True)
    if config.algo.constant_length is None:
        limit = config.rollout.sampling.max_new_tokens
        yield Decision("algo.constant_length", limit, "rollout.sampling.max_new_tokens")


def _value(config: Any, key: str) -> Any:
    """Of a dotted key; ... where the config of this command has no such key."""
    return reduce(lambda part, name: getattr(part, name, ...), key.split("."), config)


def _of_the_loop(config: RunConfig) -> Iterator[Decision]:
    loop = config.loop
    if loop.max_staleness is None:
        yield Decision("loop.max_staleness", loop.staleness, f"loop.kind is {loop.kind}")
    if loop.eval_term is None:
        yield Decision("loop.eval_term", config.eval_term, "the reward")
    if loop.eval_pass_score is None:
        score = config.eval_pass_score
        if isinstance(score, dict):
            yield Decision("loop.eval_pass_score", None, "the weights of the terms that apply")
        else:
            yield Decision("loop.eval_pass_score", score, "the full score of loop.eval_term")
    if loop.replace_by is None:
        weights = config.replace_weights
        names = [config.eval_term] if weights is None else sorted(weights)
        reason = "loop.eval_term" if loop.eval_term is not None else "the terms that judge an answer"
        yield Decision("loop.replace_by", names[0] if len(names) == 1 else None, f"{reason}: {' + '.join(names)}")
    if loop.save_every_steps is None:
        reason = f"at evaluations, and after {AUTO_SAVE_S:g} s"
        yield Decision("loop.save_every_steps", None, reason)


def _of_the_samplers(
    config: RunConfig, model: ModelNumbers | None, machine: Machine, num_nodes: int
) -> Iterator[Decision]:
    rollout, has_own_memory = config.rollout, machine.device not in (None, "cpu")
    is_colocated = config.cluster.num_rollout_ranks == 0
    if rollout.tensor_model_parallel_size is None:
        yield Decision("rollout.tensor_model_parallel_size", rollout.mesh.infer_tp, "rollout.mesh.infer_tp")
    sampling = "greedy, since loop.eval_samples is 1" if config.loop.eval_samples == 1 else "rollout.sampling"
    for name, value in rollout.eval_sampling:
        if value is None:
            reason = sampling if name == "temperature" else "rollout.sampling"
            yield Decision(f"rollout.eval_sampling.{name}", getattr(config.eval_sampling, name), reason)
    if rollout.max_context_tokens is None and model is not None and model.num_positions is not None:
        yield Decision("rollout.max_context_tokens", model.num_positions, "the model's positions")
    if rollout.sync_bucket_bytes is None:
        rule = f"{DEVICE_BUCKET_BYTES >> 20:,} MiB on accelerators, else {HOST_BUCKET_BYTES >> 20} MiB"
        size = None if machine.device is None else DEVICE_BUCKET_BYTES if has_own_memory else HOST_BUCKET_BYTES
        yield Decision("rollout.sync_bucket_bytes", size, rule, is_of_machine=True)
    if rollout.release_memory is None:
        rule = "colocated on accelerators, full sync"
        never = not (is_colocated and rollout.releases(on_accelerators=True))
        known = False if never else None if machine.device is None else rollout.releases(has_own_memory)
        yield Decision("rollout.release_memory", known, rule, is_of_machine=not never)
    if rollout.embedded.kv_cache_bytes is None:
        yield CACHE_LIMIT
    if rollout.embedded.prefix_cache is None:
        yield Decision("rollout.embedded.prefix_cache", config.agent.kind != "single_turn", "agent.kind")
    if rollout.sync_mode == "delta" and fastest_sync(rollout, config.model, num_nodes, machine.is_launched) == "full":
        reason = "in shared memory all weights take less time"
        yield Decision("rollout.sync_mode", "full", reason)


def fastest_sync(rollout: RolloutConfig, model: ModelConfig, num_nodes: int, is_launched: bool) -> str:
    """sync_mode full where the weights stay in shared memory: there all of them are copied in less time than their
    changes are found and written. Samplers that get only adapters still do. Under torchrun the ranks may be on several
    machines."""
    sends_adapters = model.lora.enabled and rollout.takes_adapters(model.lora)
    if num_nodes > 1 or is_launched or rollout.sync_transport == "broadcast" or sends_adapters:
        return rollout.sync_mode
    return "full"


def _logits_at_one_time(model: ModelNumbers | None, machine: Machine) -> Decision:
    """A rule, since a forward on a CPU may store all logits of a small micro-batch."""
    on_cpu = machine.device in (None, "cpu")
    limit = CHUNK_LOGITS_ON_CPU if on_cpu else CHUNK_LOGITS
    tokens = "" if model is None else f"{max(1, limit // model.vocab_size):,} tokens: "
    return Decision("train.logprob_chunk_tokens", None, f"{tokens}{limit:,} logits")


def deadlines_of(cluster: ClusterConfig, rollout: RolloutConfig | None) -> dict[str, float]:
    """Seconds by phase. A rank loads for as long as its server may take to start, unless cluster.deadlines.load is
    set."""
    deadlines = {phase: cluster.deadline_s(phase) for phase in Deadlines.model_fields}
    if rollout is not None and rollout.start_deadline_s and cluster.deadlines.load is None:
        deadlines["load"] = max(cluster.timeout_s, rollout.start_deadline_s + AFTER_START_S)
    return deadlines


def micro_batch(model: ModelConfig, train: TrainConfig, numbers: ModelNumbers) -> Decision:
    """The value of train.max_tokens_per_microbatch when it is null: a power of two, and a function of the configs
    alone, so that a run's micro-batches are the same on every machine."""
    stored = stored_numbers(numbers, train.torch_compile, train.activation_checkpointing)
    num_bytes = stored * numbers.num_layers * (4 if model.dtype == "float32" else 2)
    fitting = 1 << (ACTIVATION_BYTES // num_bytes).bit_length() - 1
    tokens = min(MOST_TOKENS, max(FEWEST_TOKENS, fitting))
    reason = f"{ACTIVATION_BYTES >> 30} GiB of activations, {num_bytes:,} bytes a token"
    return Decision("train.max_tokens_per_microbatch", tokens, reason)


def recomputed_every(mode: bool | str) -> int:
    """Of how many blocks one stores its input alone, by train.activation_checkpointing; 0 = none."""
    if isinstance(mode, str) and mode.startswith("every_"):
        return int(mode.removeprefix("every_"))
    return int(mode in (True, "block"))


def stored_numbers(numbers: ModelNumbers, compiled: bool = False, mode: bool | str = False) -> int:
    """About how many numbers a decoder block stores of each token for its backward pass: what its norms, products and
    attention read again. torch.compile computes some of them again. mode: of train.activation_checkpointing
    (benchmarks/activation_memory.py)."""
    hidden, inner = numbers.hidden_size, numbers.intermediate_size or 4 * numbers.hidden_size
    if mode in ("submodule", "selective"):
        return 7 * hidden if mode == "submodule" else 6 * hidden + 2 * inner
    complete = 7 * hidden + 3 * inner if compiled else 10 * hidden + 4 * inner
    every = recomputed_every(mode)
    return (hidden + (every - 1) * complete) // every if every else complete
