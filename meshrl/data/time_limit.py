"""A time limit for Python code of a user in any thread, such as a chat template, which is a program."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_TICK_S = 0.1


class TooLongError(Exception):
    """Raised inside the block, between two instructions of Python: a single call into C is not interrupted."""


@dataclass(eq=False, slots=True)
class _Block:
    thread: int
    deadline: float
    interrupted: bool = False


_lock = threading.Lock()
_running: set[_Block] = set()
_watchdog: threading.Thread | None = None  # runs while a block runs, and up to one tick longer


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLongError in the block when it takes longer. Costs some microseconds."""
    global _watchdog
    block = _Block(threading.get_ident(), time.monotonic() + seconds)
    with _lock:
        _running.add(block)
        if _watchdog is None or not _watchdog.is_alive():
            _watchdog = threading.Thread(target=_interrupt_all, name="time-limit", daemon=True)
            _watchdog.start()
    try:
        yield
    finally:
        try:
            _leave(block)
        except TooLongError:  # raised just now; the next one could come only a tick later
            _leave(block)
            raise


def _leave(block: _Block) -> None:
    with _lock:
        _running.discard(block)
        if block.interrupted:  # perhaps not yet raised: it must not be raised after the block
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(block.thread), None)


def _interrupt_all() -> None:
    global _watchdog
    while True:
        time.sleep(_TICK_S)
        with _lock:
            if not _running:
                _watchdog = None
                return
            now = time.monotonic()
            for block in _running:
                if now > block.deadline:  # again in each tick: the block may have caught the last one
                    block.interrupted = True
                    error = ctypes.py_object(TooLongError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(block.thread), error)
