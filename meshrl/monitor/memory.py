"""Resident memory of a run's processes."""

from __future__ import annotations

import os

from meshrl.core.types import Metric
from meshrl.process.family import family


def memory_metrics(own_name: str = "controller") -> list[Metric]:
    """`memory/rss_bytes`: this process and all its descendants. `memory/rss_bytes/<name>`: the processes of one name.
    This process has the name own_name; the others have the name rank_<number>, reward, fork_server or other.

    Pages that processes share (libraries, weights in shared memory) count in each of them. Of several calls in one
    step, the largest value is reported.
    """
    by_name: dict[str, int] = {}
    for process in family(os.getpid()):
        name = own_name if process.pid == os.getpid() else process.name
        by_name[name] = by_name.get(name, 0) + process.rss_bytes
    sizes = {"memory/rss_bytes": sum(by_name.values())} | {f"memory/rss_bytes/{n}": b for n, b in by_name.items()}
    return [Metric(name=name, sum=float(size), reduce="max", unit="bytes") for name, size in sizes.items()]
