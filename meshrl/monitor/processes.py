"""Processes of this machine: which of a run's they are, how large, and whether they still run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

_NAMES = {
    "meshrl.cluster.worker": "rank",
    "meshrl.reward.worker": "reward",
    "meshrl.process.fork_server": "fork_server",
}


@dataclass(frozen=True, slots=True)
class Resident:
    """A process and its resident size. name: rank_0, reward, fork_server; "other" for what is no process of a run."""

    pid: int
    name: str
    rss_bytes: int


def family(pid: int) -> Iterator[Resident]:
    """A process and all its descendants, but for those that end meanwhile."""
    try:
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in found:
        try:
            yield Resident(process.pid, _name(process), process.memory_info().rss)
        except psutil.NoSuchProcess:  # it ended between the listing and the question
            continue


def _name(process: psutil.Process) -> str:
    try:
        arguments = process.cmdline()
    except psutil.AccessDenied:
        return "other"
    for module, name in _NAMES.items():
        if module in arguments:
            return next((word for word in arguments if re.fullmatch(rf"{name}_\d+", word)), name)
    return "other"


def started_at(pid: int) -> float | None:
    """When a process was started, in seconds since 1970, which tells it from a later one of the same id; None when it
    does not run."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
