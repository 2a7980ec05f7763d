"""The memory that a run needs by its plan, and whether it fits, before a process starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

from meshrl.cluster.remote import is_launched
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.device import device_type
from meshrl.core.errors import ConfigError
from meshrl.model.limits import model_numbers
from meshrl.plan.changes import Keys, changes
from meshrl.plan.decisions import stored_numbers
from meshrl.plan.disk_use import size_text
from meshrl.plan.memory import CACHE, ERROR, PHASES, PlannedRun, RankMemory, fits
from meshrl.plan.run_plan import with_value
from meshrl.plan.sizes import micro_batch_tokens
from meshrl.process.diagnosis import memory_limit

SMALL = 0.25  # of the limit: no plan is made for less


def plan_memory(cfg: RunConfig | SftRunConfig, note: Callable[[str], None]) -> tuple[RankMemory, ...]:
    """Of each kind of rank of a run that trains; empty = not planned. Ranks on this machine's CPU are compared with its
    limit; those on accelerators compare themselves.

    Raises: ConfigError as check_memory."""
    is_on_cpu, limit = cfg.cluster.executor != "ray" and device_type() == "cpu", memory_limit()
    if cfg.run.ignore_plan or (is_on_cpu and is_launched()):  # by torchrun, with ranks on other machines
        return ()
    try:
        if is_on_cpu and _at_most(cfg) < SMALL * limit:
            return ()
        from meshrl.model.costs import run_memory  # imports the model's code, which no small run needs here

        job, ranks = run_memory(cfg, *("cpu", limit) if is_on_cpu else (None,))
    except ConfigError:
        return ()  # the ranks raise it
    if is_on_cpu and (text := check_memory(cfg, job, ranks, limit)):
        note(f"note: {text}")
    return ranks


def check_memory(cfg: RunConfig | SftRunConfig, job: PlannedRun, ranks: Sequence[RankMemory], limit: int) -> str | None:
    """Returns a note if the run may not fit, also if it does unless many answers are long: the embedded engine's cache
    grows with them. limit: bytes that its processes may use.

    Raises: ConfigError if it does not, with a change that helps."""
    from meshrl.model.costs import run_memory

    machine = _machine(cfg, ranks)
    if fits(machine, limit):
        return None
    need = machine.total(machine.peak)
    text = f"by its plan, the run needs {size_text(need)} of memory, and this machine gives it {size_text(limit)}"
    if need * (1 - ERROR) <= limit:
        return f"{text}. Plans differ from measured peaks by up to {ERROR:.0%}, so it may end for lack of memory"
    grows = CACHE if isinstance(cfg, RunConfig) and cfg.rollout.engine == "embedded" else ""
    least, samplers = _machine(cfg, ranks, grows), getattr(cfg.cluster, "num_rollout_ranks", 0)
    if grows and least.total(least.peak) * (1 - ERROR) <= limit:
        note = f"{text}. Without the sampler's cache, which grows with the answers, it needs "
        note += size_text(least.total(least.peak))
        each = (int(limit / (1 + ERROR)) - least.total("rollout")) // (samplers or cfg.cluster.num_train_ranks)
        limited = f"; rollout.embedded.kv_cache_bytes={each // 10**7 * 10**7} limits the cache, rows then wait"
        return note + limited * (each >= 10**7)

    def planned(keys: Keys) -> Sequence[RankMemory]:
        changed = reduce(with_value, keys.items(), cfg)
        return [_machine(changed, run_memory(changed, "cpu", limit)[1], grows)]

    found = changes(job, [least], limit, planned)
    fewer = "Use fewer ranks, shorter rows or a smaller model"
    remedy = f"Set {' '.join(found[-1].overrides)}" if found and found[-1].fits else fewer
    raise ConfigError(
        f"{text}. {remedy}. --explain prints the parts of each phase; run.ignore_plan=true starts the run all the same"
    )


def _machine(cfg: RunConfig | SftRunConfig, ranks: Sequence[RankMemory], without: str = "") -> RankMemory:
    """The ranks of this machine together. without: a part."""
    counts = cfg.cluster.num_train_ranks, getattr(cfg.cluster, "num_rollout_ranks", 0)
    machine = RankMemory("machine")
    for count, rank in zip(counts, ranks, strict=False):
        for phase in PHASES:
            machine.add(f"{count} x {rank.what}", count * rank.total(phase, (without,)), [phase])
    return machine


def _at_most(cfg: RunConfig | SftRunConfig) -> float:
    """Bytes of all ranks, more than the run needs, without a trace: 12 times the weights in fp32, and what its blocks
    store for a micro-batch and for the rows of a sampler."""
    numbers, files = model_numbers(cfg.model.path), Path(cfg.model.path).glob("*.safetensors")
    weights = 2 * sum(file.stat().st_size for file in files)
    tokens, longest, _ = micro_batch_tokens(cfg, cfg.cluster.num_train_ranks)
    rows = cfg.rollout.max_running_requests if isinstance(cfg, RunConfig) else 0
    of_token = 2 * stored_numbers(numbers) * numbers.num_layers + 4 * numbers.vocab_size
    cached = rows * longest * 4 * numbers.hidden_size * numbers.num_layers
    ranks = cfg.cluster.num_train_ranks + getattr(cfg.cluster, "num_rollout_ranks", 0)
    return ranks * 4.0 * (3 * weights + tokens * of_token + 2 * cached + (1 << 27))
