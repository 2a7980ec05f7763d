"""A limit of time on a stretch of Python that somebody else wrote, in any thread: a chat template is a program."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_TICK_S = 0.1


class TooLongError(Exception):
    """Raised inside the stretch, between two steps of it: a single call into C is not interrupted."""


@dataclass(eq=False, slots=True)
class _Stretch:
    thread: int
    deadline: float
    told: bool = False


_lock = threading.Lock()
_running: set[_Stretch] = set()
_watch: threading.Thread | None = None  # is there while a stretch runs, and a moment longer


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """What runs in it gets TooLongError when it takes longer. Costs some microseconds."""
    global _watch
    stretch = _Stretch(threading.get_ident(), time.monotonic() + seconds)
    with _lock:
        _running.add(stretch)
        if _watch is None or not _watch.is_alive():
            _watch = threading.Thread(target=_watch_all, name="time-limit", daemon=True)
            _watch.start()
    try:
        yield
    finally:
        try:
            _leave(stretch)
        except TooLongError:  # came in that very moment; the next would come a tick later
            _leave(stretch)
            raise


def _leave(stretch: _Stretch) -> None:
    with _lock:
        _running.discard(stretch)
        if stretch.told:  # and perhaps not yet raised: it must not come after the stretch
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(stretch.thread), None)


def _watch_all() -> None:
    global _watch
    while True:
        time.sleep(_TICK_S)
        with _lock:
            if not _running:
                _watch = None
                return
            now = time.monotonic()
            for stretch in _running:
                if now > stretch.deadline:  # told again each tick: what runs may have caught the one before
                    stretch.told = True
                    error = ctypes.py_object(TooLongError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(stretch.thread), error)
