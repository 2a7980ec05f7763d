"""Resident memory of a run's processes (P32)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from meshrl.core.types import Metric
from meshrl.monitor.processes import family


def memory_metrics(names: Mapping[int, str] | None = None, own_name: str = "controller") -> list[Metric]:
    """`memory/rss_bytes`: this process and all its descendants. `memory/rss_bytes/<name>`: single ones; this process
    by own_name, the others by `names` (pid -> name) or what they are: rank_<number>, reward, fork_server,
    other; those of one name together.

    Pages that processes share (libraries, weights in shared memory) count in each of them. Merging several calls
    within a step keeps the largest.
    """
    named = {**(names or {}), os.getpid(): own_name}
    by_name: dict[str, int] = {}
    for process in family(os.getpid()):
        name = named.get(process.pid, process.name)
        by_name[name] = by_name.get(name, 0) + process.rss_bytes
    sizes = {"memory/rss_bytes": sum(by_name.values())} | {f"memory/rss_bytes/{n}": b for n, b in by_name.items()}
    return [Metric(name=name, sum=float(size), reduce="max", unit="bytes") for name, size in sizes.items()]
