"""`meshrl plan`: whether a run fits into the memory of its devices, what needs most, and which changes make it fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshrl.config.load import Loaded, is_sft, load_run_config
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.values import show
from meshrl.core.errors import ConfigError
from meshrl.plan.changes import Change, Keys, changes, fit
from meshrl.plan.disk_use import size_text
from meshrl.plan.explain import memory_table
from meshrl.plan.memory import ERROR, PlannedRun, RankMemory, traffic, verdict
from meshrl.plan.search import MODEL, fastest

Load = Callable[[Sequence[str]], RunConfig | SftRunConfig]
"""The config with these overrides. Raises: ConfigError."""


def plan_command(
    source: str,
    overrides: Sequence[str],
    gpus: int | None,
    device_bytes: int | None,
    as_json: bool,
    search: bool,
    schedule: Path | None,
) -> str:
    """The text of `meshrl plan`. schedule: the run of --from; None = the memory alone is planned."""
    from meshrl.run.inputs import load_run, load_sft

    if schedule is not None and is_sft(source):
        raise ConfigError("--schedule compares when a run samples and when it trains, and SFT does not sample")
    load_config: Callable[..., Loaded[Any]] = load_sft if is_sft(source) else load_run
    if schedule is None and gpus is not None and any(text.startswith("cluster.num_train_ranks=") for text in overrides):
        raise ConfigError("--gpus and cluster.num_train_ranks are two ways to write one number; give only one")

    def load(keys: Sequence[str]) -> Any:
        return load_config(source, [*overrides, *keys], starts=False).config

    if schedule is None:
        return plan_memory(load, gpus, device_bytes, as_json, search)
    from meshrl.tools.schedule.advise import advise

    def check(keys: Sequence[str]) -> object:
        return load_run_config(source, [*overrides, *keys], starts=False)

    def memory(keys: Sequence[str]) -> tuple[int, bool]:
        from meshrl.model.costs import run_memory

        _, ranks = run_memory(load(keys), None, device_bytes)
        return max(rank.total(rank.peak) for rank in ranks), fit(ranks, device_bytes or 0)

    return advise(load(()), check, schedule, gpus, memory if device_bytes is not None else None) + "\n"


def plan_memory(load: Load, gpus: int | None, device_bytes: int | None, as_json: bool, search: bool = False) -> str:
    """gpus: in place of the config's ranks. device_bytes: of each device; None = tables without a verdict. search: the
    fastest meshes and modes that fit, in place of changes."""
    from meshrl.model.costs import run_memory

    base = _overrides(load, gpus)

    def planned(keys: Keys) -> tuple[PlannedRun, tuple[RankMemory, ...]]:
        texts = [f"{key}={show(value)}" for key, value in keys.items()]
        return run_memory(load([*base, *texts]), None, device_bytes)

    job, ranks = planned({})
    is_enough, found = device_bytes is None or fit(ranks, device_bytes), list[Change]()
    if device_bytes is not None and search:
        found = fastest(job, device_bytes, planned)
    elif device_bytes is not None and not is_enough:
        found = changes(job, ranks, device_bytes, lambda keys: planned(keys)[1])
    if as_json:
        return json.dumps(_facts(job, ranks, device_bytes, found), indent=1) + "\n"
    lines = [memory_table(rank) for rank in ranks]
    if sent := traffic(job):
        lines.append(
            "a train rank sends in an optimizer step, at most: "
            + ", ".join(f"{axis} {size_text(int(size))}" for axis, size in sent.items())
        )
    if device_bytes is not None:
        lines += [f"{rank.what}: {verdict(rank, device_bytes)}" for rank in ranks]
        lines.append(f"measured peaks differ from plans by up to {ERROR:.0%} (docs/perf/memory.md)")
    if search:
        lines.append(f"{'the fastest that fit' if found else 'no mesh and mode fits'}; {MODEL}")
    elif found:
        lines.append("changes that lower it, each planned again, the cheapest first:")
    texts = [" ".join(each.overrides) or "as it is" for each in found]
    width = max(map(len, texts), default=0)
    for each, keys in zip(found, texts, strict=True):
        need = size_text(each.need)
        lines.append(f"  {keys:<{width}} {need:>9}  {'fits' * each.fits:<6}{each.cost}")
    if not search and not is_enough and not (found and found[-1].fits):
        lines.append("no change of these keys is enough: use more GPUs (--gpus N), shorter rows or a smaller model")
    return "\n".join(lines) + "\n"


def _overrides(load: Load, gpus: int | None) -> list[str]:
    """Overrides for this number of GPUs, for which alone the config may be right."""
    if gpus is None:
        return []
    if gpus < 1:
        raise ConfigError(f"--gpus is {gpus}; it must be 1 or more")
    try:
        config = load(())
    except ConfigError:
        config = load([f"cluster.num_train_ranks={gpus}"])
    samplers = config.cluster.num_rollout_ranks if isinstance(config, RunConfig) else 0
    if gpus <= samplers:
        raise ConfigError(
            f"--gpus is {gpus}, but cluster.num_rollout_ranks is {samplers}: no GPU is left to train. Give more "
            "GPUs, or fewer ranks that sample"
        )
    return [f"cluster.num_train_ranks={gpus - samplers}"]


def _facts(
    job: PlannedRun, ranks: Sequence[RankMemory], device_bytes: int | None, found: Sequence[Change]
) -> dict[str, Any]:
    return {
        "device_bytes": device_bytes,
        "fits": None if device_bytes is None else fit(ranks, device_bytes),
        "ranks": [
            {
                "rank": rank.what,
                "peak": rank.peak,
                "bytes": {phase: rank.total(phase) for phase in rank.phases},
                "device": rank.device,
                "host": rank.host,
                "unknown": rank.unknown,
            }
            for rank in ranks
        ],
        "sent_bytes": traffic(job),
        "changes": [{"keys": c.overrides, "bytes": c.need, "fits": c.fits, "cost": c.cost} for c in found],
    }
