"""The event loop of a run and its watchdog: while one call blocks the loop, no deadline can be noticed."""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.core.terminal import print_message

T = TypeVar("T")
_BEAT_S = 5.0
_STDERR = 2  # sys.stderr of a notebook has no file
_END_S = 5.0  # after the end of a run, for tasks that an agent has started and that are cancelled


def run_in_own_loop(main: Coroutine[Any, Any, T], owner: str = "the run") -> T:
    """asyncio.run that also works where a loop already runs in this thread, as in a notebook; that loop waits
    meanwhile. The run is in the caller's thread: Ctrl-C is a signal, which only the main thread
    handles. Tasks that are left are cancelled; those that do not end within _END_S are named as tasks of `owner`, and
    not awaited."""
    loop = asyncio._get_running_loop()  # asyncio has these functions for libraries that have their own event loops
    main = _with_an_end(main, owner)
    if loop is None:
        return asyncio.run(main)
    task = asyncio.current_task()
    if task is not None:
        asyncio._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(main)
    finally:
        asyncio._set_running_loop(loop)
        asyncio.set_event_loop(loop)  # asyncio.run has removed it
        if task is not None:
            asyncio._enter_task(loop, task)


async def _with_an_end(main: Coroutine[Any, Any, T], owner: str) -> T:
    try:
        return await main
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        places = []
        for task in (await asyncio.wait(left, timeout=_END_S))[1] if left else ():
            asyncio._unregister_task(task)  # asyncio.run would wait for it for ever
            code = cast(Any, task.get_coro()).cr_code
            places.append(f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})")
        if places:
            print_message(
                f"note: {owner} has started {', '.join(places)}, which did not end within {_END_S:g} s after it was "
                "cancelled. Let asyncio.CancelledError end it"
            )


@contextmanager
def watchdog(cluster: ClusterConfig) -> Iterator[None]:
    """End this process when one call blocks the running event loop for longer than any phase may take, and print the
    stacks of all threads to stderr. Ranks and reward workers end with it. The timer needs neither the event loop nor
    the interpreter's lock, so a call into C code that keeps the lock is found, too."""
    limit_s = max(cluster.timeout_s, *map(cluster.deadline_s, Deadlines.model_fields)) + 2 * _BEAT_S
    loop, timer = asyncio.get_running_loop(), list[asyncio.Handle]()

    def beat() -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
        timer[:] = [loop.call_later(_BEAT_S, beat)]

    beat()
    try:
        yield
    finally:
        timer.pop().cancel()
        faulthandler.cancel_dump_traceback_later()
