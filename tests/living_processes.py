"""Processes that still run. A zombie does not, and neither does a process that ends while it is being looked at."""

from __future__ import annotations

import re

import psutil


def is_living(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def living_below(pattern: str) -> list[psutil.Process]:
    """Descendants of this process that still run and whose command line matches the regular expression."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and re.search(pattern, " ".join(process.cmdline())):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
