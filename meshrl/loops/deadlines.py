"""Deadlines of what the controller itself waits for: agents and graders. The ranks' commands have theirs in cluster."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from meshrl.config.cluster import ClusterConfig
from meshrl.core.errors import DeadlineError

T = TypeVar("T")
_SLACK_S = 10.0  # a rank that gives no answer is named by its own deadline, which therefore comes first
_SHOWN = 3


async def in_time(cluster: ClusterConfig, phase: str, jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What the jobs return, in order. They may take as long as they like, while some of them end.

    Raises: DeadlineError when none ends for the phase's deadline (noticed after twice that at most), with the places
    where they wait; else the first exception of a job.
    """
    tasks = [asyncio.ensure_future(job) for job in jobs]
    limit_s = cluster.deadline_s(phase) + _SLACK_S
    everything, ended = asyncio.gather(*tasks), 0
    everything.add_done_callback(lambda all_: all_.cancelled() or all_.exception())  # asked for here, if not below
    try:
        while not (await asyncio.wait({everything}, timeout=limit_s))[0]:
            before, ended = ended, sum(task.done() for task in tasks)
            if ended == before:
                waiting = [task for task in tasks if not task.done()]
                places = "".join(f"\n{where_it_waits(task)}" for task in waiting[:_SHOWN])
                raise DeadlineError(
                    f"phase {phase!r}: none of {len(waiting)} tasks that wait ended within {limit_s:g} s "
                    f"(cluster.deadlines.{phase}, or cluster.timeout_s, and {_SLACK_S:g}). They wait at:{places}"
                )
        return everything.result()
    finally:
        for task in tasks:
            task.cancel()


def where_it_waits(task: asyncio.Task[Any]) -> str:
    """The stack of a task that waits, from its outermost coroutine to the innermost."""
    frames, coroutine = [], task.get_coro()
    while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
        frames.append((coroutine.cr_frame, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    return "".join(traceback.StackSummary.extract(iter(frames)).format()).rstrip()
