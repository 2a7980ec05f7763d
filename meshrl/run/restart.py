"""A run that loses train ranks starts new ones and continues from its last checkpoint. Ranks that only sample, reward
workers and the loaded task are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from meshrl.cluster.launch import Groups
from meshrl.core.errors import RankFailure, SyncError
from meshrl.loops.job import Resumable
from meshrl.run.folder import Start
from meshrl.run.live import LiveRun
from meshrl.run.signals import save_at_the_end
from meshrl.sync.layout import Layout

_CAUSE_WAIT_S = 5.0


@contextmanager
def failures_raised(groups: Groups) -> Iterator[None]:
    """Raise a failure from which the groups can't recover by themselves in this block, as soon as it is detected and
    even while the block waits for something else."""
    task, failures = asyncio.current_task(), list[RankFailure]()
    assert task is not None

    def on_failure(failure: RankFailure) -> None:
        if not failures:
            task.cancel()
        failures.append(failure)

    before, groups.on_failure = groups.on_failure, on_failure
    try:
        yield
    except (asyncio.CancelledError, RankFailure):
        if not failures or task.uncancel() > 0:  # cancelled by another request, too: the run must end
            raise
        raise failures[0] from None
    finally:
        groups.on_failure = before


async def run_to_end(
    run: LiveRun, job: Resumable, groups: Groups, layout: Layout | None, loop: Callable[[], Awaitable[None]]
) -> None:
    """Run the loop of `job` from run.start to its end, with restarts; a run that is ended by a signal saves a
    checkpoint.

    layout: of the syncs, if the run samples. Raises: as `_with_restarts`.
    """
    run.stop.can_fall_back = lambda: run.checkpoints.newest_on_disk() > 0
    try:
        await _with_restarts(run, job, groups, layout, loop)
    except asyncio.CancelledError:
        await save_at_the_end(run.stop, run.checkpoints, job.step, partial(run.save, job), run.note)
        raise


async def _with_restarts(
    run: LiveRun, job: Resumable, groups: Groups, layout: Layout | None, loop: Callable[[], Awaitable[None]]
) -> None:
    """Raises: errors of restoring and of the loop; a RankFailure that reports an exception (it would occur again), or
    that occurs before the first checkpoint, after cluster.max_restarts restarts, or under torchrun (use its
    --max-restarts). If ranks are lost again while new ones start, the first failure is raised."""
    start, began = run.start, 0.0
    first: RankFailure | None = None
    most = run.loaded.config.cluster.max_restarts
    while True:
        run.stop.trainer_is_valid = start is None  # else False until the trainer has loaded the checkpoint
        try:
            with failures_raised(groups):
                if first is not None:
                    await groups.restart_trainers(layout)
                if start is not None:
                    await run.restore(job, start)
                if first is not None:
                    run.note(f"the train ranks are back after {time.monotonic() - began:.1f} s")
                first, run.stop.trainer_is_valid = None, True
                try:
                    return await loop()
                except SyncError:
                    await asyncio.sleep(_CAUSE_WAIT_S)  # if a lost train rank is the cause, its failure ends this wait
                    raise
        except RankFailure as failure:
            if run.stop.signal is not None:  # the run would have ended after this step
                run.stop.trainer_is_valid = False
                raise asyncio.CancelledError from failure
            if first is None:
                first, began = failure, time.monotonic()
            else:
                first.add_note(f"while new train ranks started: {_first_line(failure)}")
            start = await _next_start(run, groups, first, failure)
            run.restarts += 1
            count = f"restart {run.restarts} of {most}"
            run.note(f"{_first_line(failure)}; starting the train ranks again after step {start.step}, {count}")
            if (stacks := run.keep_stacks(failure)) is not None:
                run.note(f"the stacks of all ranks at the failure: {stacks}")


async def _next_start(run: LiveRun, groups: Groups, first: RankFailure, failure: RankFailure) -> Start:
    """The checkpoint to continue from. Raises: `first`, with the reason why the run can't continue."""
    if not groups.can_restart_after(failure):
        raise first
    if run.restarts >= run.loaded.config.cluster.max_restarts:
        first.add_note(f"the train ranks had already been restarted {run.restarts} times (cluster.max_restarts)")
        raise first
    await run.checkpoints.abandon()
    start = run.newest_start()
    if start is None:
        first.add_note("the train ranks can't be restarted, because there is no checkpoint yet")
        raise first
    return start


def _first_line(failure: RankFailure) -> str:
    return str(failure).splitlines()[0]
