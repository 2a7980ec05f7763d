"""The loop of a run until its end. A run that loses train ranks starts new ones and continues from its last checkpoint;
ranks that only sample, reward workers and the loaded task are kept. An interrupted run saves a checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from meshrl.cluster.launch import Groups
from meshrl.core.errors import RankFailure, SyncError
from meshrl.loops.job import Resumable
from meshrl.run.folder import Start, newest_start
from meshrl.run.live import LiveRun
from meshrl.run.signals import GRACE_S
from meshrl.sync.layout import Layout

_CAUSE_WAIT_S = 5.0
_LAST_SAVE_S = 1.0  # for a checkpoint that is almost complete


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
        await _save_at_the_end(run, job)
        raise


async def _save_at_the_end(run: LiveRun, job: Resumable) -> None:
    """Save the last finished step of an interrupted run, or report the last checkpoint. Waits for the running command
    of the ranks, after Ctrl-C at most GRACE_S."""
    if run.stop.trainer_is_valid and job.step in (0, run.checkpoints.newest_on_disk()):
        what = ", which is saved" if job.step else "; there is nothing to save yet"
        run.note(f"interrupted after step {job.step}{what}")
        return
    if run.stop.trainer_is_valid:
        run.note(f"interrupted; ending with a checkpoint of step {job.step}")
        try:
            async with asyncio.timeout(GRACE_S if run.stop.is_urgent else None):
                await run.checkpoints.trainer.idle()
        except (TimeoutError, RankFailure):
            pass
        else:
            await run.save(job)
            return
    await run.checkpoints.abandon(_LAST_SAVE_S)
    last = run.checkpoints.saved_step
    ends_with = f"its last checkpoint, after step {last}" if last else "no checkpoint"
    run.note(f"the ranks are in the middle of a step, which is not saved; the run ends with {ends_with}")


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
                    run.note(f"the train ranks were restarted in {time.monotonic() - began:.1f} s")
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
        first.add_note(
            f"the train ranks are not restarted again: restarts so far {run.restarts}, cluster.max_restarts "
            f"{run.loaded.config.cluster.max_restarts}. Raise it, or continue the run with run.resume=auto"
        )
        raise first
    await run.checkpoints.abandon()
    start = newest_start(run.folder, run.kind, run.num_steps) or run.start
    if start is None:
        first.add_note("the train ranks can't be restarted, because there is no checkpoint yet")
        raise first
    return start


def _first_line(failure: RankFailure) -> str:
    return str(failure).splitlines()[0]
