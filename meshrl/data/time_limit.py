"""A time limit for Python code of a user in any thread, such as a chat template, which is a program.

The interpreter raises an exception that another thread has set with PyThreadState_SetAsyncExc. Never call that function
with NULL, to clear an exception: on Python 3.11 every traced call in the process would then wait for ever.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_TICK_S = 0.1
_REPEAT_S = 1.0  # long enough to leave a block in, so that its end is interrupted once at most


class TooLongError(Exception):
    """Raised inside the block, between two instructions of Python: a single call into C is not interrupted."""


_lock = threading.Lock()
_deadlines: dict[int, float] = {}  # by thread, while it runs a block
_watchdog: threading.Thread | None = None  # runs while a block runs, and up to one tick longer


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLongError in the block when it takes longer. Costs some microseconds. Not to be nested."""
    global _watchdog
    thread = threading.get_ident()
    with _lock:
        _deadlines[thread] = time.monotonic() + seconds
        if _watchdog is None or not _watchdog.is_alive():
            _watchdog = threading.Thread(target=_interrupt_all, name="time-limit", daemon=True)
            _watchdog.start()
    try:
        yield
    finally:
        try:
            _leave(thread)
        except TooLongError:  # raised just now; the next one could come only after _REPEAT_S
            _leave(thread)
            raise


def _leave(thread: int) -> None:
    with _lock:
        _deadlines.pop(thread, None)  # this call raises an exception that is set but not yet raised


def _interrupt_all() -> None:
    global _watchdog
    while True:
        time.sleep(_TICK_S)
        with _lock:
            if not _deadlines:
                _watchdog = None
                return
            now = time.monotonic()
            for thread, deadline in _deadlines.items():
                if now > deadline:
                    _deadlines[thread] = now + _REPEAT_S  # the block may catch the exception
                    error = ctypes.py_object(TooLongError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
