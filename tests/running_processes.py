"""Processes that still run. A zombie does not count, nor does a process that ends during the check."""

from __future__ import annotations

import re

import psutil


def is_running_process(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running_descendants(pattern: str) -> list[psutil.Process]:
    """Running descendants of this process with a command line that matches the regular expression."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and re.search(pattern, " ".join(process.cmdline())):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
