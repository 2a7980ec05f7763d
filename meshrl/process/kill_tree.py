"""Kill a process together with all its descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import psutil

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def kill_descendants(pid: int) -> None:
    """Send SIGKILL to all descendants of a process, in any process group or session, until no new ones appear."""
    killed: set[int] = set()
    while True:
        try:
            found = {child.pid for child in psutil.Process(pid).children(recursive=True)} - killed
        except psutil.NoSuchProcess:
            return
        if not found:
            return
        for child in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        killed |= found


def end_with_parent(parent: int | None) -> None:
    """Make the kernel kill this process when the parent's thread that started it ends; None cancels this. Linux only.
    parent: its process id; if the parent has already ended, this process ends at once."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL if parent is not None else 0)
    if sys.platform == "linux" and parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that `kill_descendants` finds them. Linux only."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
