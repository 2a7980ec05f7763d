"""Resident memory of a run's processes (P32)."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from meshrl.core.types import Metric


def memory_metrics(names: Mapping[int, str] | None = None, own_name: str = "controller") -> list[Metric]:
    """`memory/rss_bytes`: this process and all its descendants. `memory/rss_bytes/<name>`: single ones; this process
    by own_name, the others by `names` (pid -> name), the unnamed together "other".

    Pages that processes share (libraries, weights in shared memory) count in each of them. Merging several calls
    within a step keeps the largest.
    """
    named = {**(names or {}), psutil.Process().pid: own_name}
    by_name: dict[str, int] = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            rss = process.memory_info().rss
        except psutil.NoSuchProcess:  # it ended between the listing and the question
            continue
        name = named.get(process.pid, "other")
        by_name[name] = by_name.get(name, 0) + rss
    sizes = {"memory/rss_bytes": sum(by_name.values())} | {f"memory/rss_bytes/{n}": b for n, b in by_name.items()}
    return [Metric(name=name, sum=float(size), reduce="max", unit="bytes") for name, size in sizes.items()]
