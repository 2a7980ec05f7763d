"""A run's processes on this machine: their names, their memory, and whether they still run."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_NAMES = {
    "meshrl.cluster.worker": "rank",
    "meshrl.reward.worker": "reward",
    "meshrl.process.fork_server": "fork_server",
}


@dataclass(frozen=True, slots=True)
class FamilyMember:
    """A process and its resident memory. name: rank_0, reward, fork_server; "other" if meshrl did not start it."""

    pid: int
    name: str
    rss_bytes: int


def family(pid: int) -> Iterator[FamilyMember]:
    """A process and all its descendants, except those that end meanwhile."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            yield FamilyMember(process.pid, _name(process), process.memory_info().rss)
        except psutil.NoSuchProcess:  # it has ended since it was listed
            continue


def own_memory() -> dict[str, int]:
    """Resident memory of this process, now and at its peak, which the system updates later."""
    now, unit = psutil.Process().memory_info().rss, 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"resident_bytes": now, "peak_resident_bytes": max(now, peak)}


def _name(process: psutil.Process) -> str:
    try:
        arguments = process.cmdline()
    except psutil.AccessDenied:
        return "other"
    for module, name in _NAMES.items():
        if module in arguments:
            return next((word for word in arguments if re.fullmatch(rf"{name}_\d+", word)), name)
    return "other"


def has_open(pid: int, path: Path) -> bool:
    """Whether a process of this user has this file open."""
    try:
        return any(path.samefile(opened.path) for opened in psutil.Process(pid).open_files())
    except (psutil.Error, OSError):
        return False
