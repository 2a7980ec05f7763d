"""The event loop of a run and its watchdog: while one call blocks the loop, no deadline can be noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar, cast

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.core.errors import DeadlineError
from meshrl.core.terminal import print_message
from meshrl.monitor.spans import latest_span

T = TypeVar("T")
_CHECK_EVERY_S = 1.0
_SLACK_S = 10.0
_GRACE_S = 20.0  # after the DeadlineError, for the run to end by itself
_END_S = 5.0  # after the end of a run, for tasks that an agent has started and that are cancelled
_FRAMES_SHOWN = 8
_PHASES = {"save": "checkpoint"}  # spans with another name than their phase


def run_in_own_loop(main: Coroutine[Any, Any, T], owner: str = "the run") -> T:
    """asyncio.run that also works where a loop already runs in this thread, as in a notebook; that loop waits
    meanwhile. The run is in the caller's thread: Ctrl-C and the watchdog need signals, which only the main thread
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
    """End the run when one call blocks the running event loop for longer than its phase may take.

    A thread raises DeadlineError in the main thread; the error's text contains the blocked stack. If a call outside
    Python can't be interrupted, the thread prints the error and ends the process; ranks and reward workers end with it.
    A run in a thread other than the main one has no watchdog, because no signal could interrupt it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    checker, loop = _Watchdog(cluster), asyncio.get_running_loop()

    timer: asyncio.Handle

    def beat() -> None:
        checker.beat = time.monotonic()
        nonlocal timer
        timer = loop.call_later(_CHECK_EVERY_S, beat)

    timer = loop.call_soon(beat)
    before = signal.signal(signal.SIGUSR1, checker.handle)
    thread = threading.Thread(target=checker.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        checker.over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        timer.cancel()


class _Watchdog:
    """beat: the last time when the event loop ran."""

    def __init__(self, cluster: ClusterConfig):
        self.cluster, self.beat, self.over = cluster, time.monotonic(), threading.Event()
        self._problem = ""

    def run(self) -> None:
        """The main function of the thread."""
        while not self.over.wait(_CHECK_EVERY_S):
            self._problem = self._find_problem()
            if not self._problem:
                continue
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            if self.over.wait(_GRACE_S) or not self._find_problem():
                continue
            print_message(f"meshrl: DeadlineError: {self._problem}")
            os._exit(1)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: it runs in the main thread, which is blocked."""
        if self._problem and self._find_problem():
            raise DeadlineError(self._problem)

    def _find_problem(self) -> str:
        """A text with the phase and the blocked stack; "" while the loop runs."""
        phase = _PHASES.get(latest_span(), latest_span())
        has_own_limit = phase in Deadlines.model_fields
        limit_s = (self.cluster.deadline_s(phase) if has_own_limit else self.cluster.timeout_s) + _SLACK_S
        blocked_s = time.monotonic() - self.beat
        if blocked_s <= limit_s:
            return ""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_list(traceback.extract_stack(frame)[-_FRAMES_SHOWN:])).rstrip()
        key = f"cluster.deadlines.{phase}, or cluster.timeout_s," if has_own_limit else "cluster.timeout_s"
        return (
            f"phase {phase or 'start'!r}: one call has blocked the controller for {blocked_s:.0f} s (allowed by {key} "
            f"plus {_SLACK_S:g} s: {limit_s:g} s). Code that waits must be async, or run in its own thread. It is "
            f"blocked at:\n{stack}"
        )
