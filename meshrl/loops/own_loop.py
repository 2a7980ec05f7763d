"""An event loop for a run, also in a process whose main thread runs one already, as a notebook's does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, that may also be called where a loop runs in this thread: that loop stands still meanwhile, as under
    any call that blocks it. The run stays in the caller's thread, because Ctrl-C and the watch over calls that block
    are signals, which only the main thread handles."""
    with _outer_loop_set_aside():
        return asyncio.run(main)


@contextmanager
def _outer_loop_set_aside() -> Iterator[None]:
    """As if no loop ran in this thread. These functions of asyncio are for libraries that bring loops of their own."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio.set_event_loop(loop)  # asyncio.run has left none
        if task is not None:
            asyncio._enter_task(loop, task)
