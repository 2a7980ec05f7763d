"""Deadlines for waits of the controller itself: for agents and graders. Commands to ranks have theirs in cluster."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from meshrl.config.cluster import ClusterConfig
from meshrl.core.errors import DeadlineError, MeshrlError

T = TypeVar("T")
_SLACK_S = 10.0  # so that the deadline of a rank's command, which names the rank, comes first
_SHOWN = 3


async def gather_with_deadline(
    cluster: ClusterConfig,
    phase: str,
    jobs: Sequence[Coroutine[Any, Any, T]],
    progress: Callable[[], int] = lambda: 0,
) -> list[T]:
    """The results of the jobs, in order. There is no limit for all of them, as long as some of them end, or `progress`
    returns another number, such as the tokens that have been computed for them.

    Raises: DeadlineError, with the stacks of waiting jobs, when neither happens within the phase's deadline (detected
    after at most twice that time); MeshrlError when a job was cancelled from inside; else the first exception of a job.
    """
    tasks = [asyncio.ensure_future(job) for job in jobs]
    limit_s = cluster.deadline_s(phase) + _SLACK_S
    everything, seen = asyncio.gather(*tasks), (0, progress())
    everything.add_done_callback(lambda all_: all_.cancelled() or all_.exception())  # marks the exception as retrieved
    try:
        while not (await asyncio.wait({everything}, timeout=limit_s))[0]:
            before, seen = seen, (sum(task.done() for task in tasks), progress())
            if seen == before:
                waiting = [task for task in tasks if not task.done()]
                places = "".join(f"\n{waiting_stack(task)}" for task in waiting[:_SHOWN])
                raise DeadlineError(
                    f"phase {phase!r}: none of {len(waiting)} waiting tasks ended within {limit_s:g} s "
                    f"(cluster.deadlines.{phase}, or cluster.timeout_s, plus {_SLACK_S:g}). They wait at:{places}"
                )
        try:
            return everything.result()
        except asyncio.CancelledError as cause:  # a cancellation of this task is raised by `wait` above
            raise MeshrlError(f"phase {phase!r}: a task was cancelled by the code that it runs") from cause
    finally:
        for task in tasks:
            task.cancel()


def waiting_stack(task: asyncio.Task[Any]) -> str:
    """The stack of a waiting task, from its outermost coroutine to the innermost."""
    frames: list[tuple[Any, int]] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
        frames.append((coroutine.cr_frame, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    return "".join(traceback.StackSummary.extract(iter(frames)).format()).rstrip()
