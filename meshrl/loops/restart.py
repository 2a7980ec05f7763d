"""A run that has lost train ranks puts new ones in their place and goes on from its last checkpoint. Samplers in ranks
of their own, reward workers and the loaded task stay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from meshrl.cluster.launch import Groups
from meshrl.core.errors import RankFailure, SyncError
from meshrl.loops.checkpoints import Checkpoints
from meshrl.loops.record import Record
from meshrl.loops.resume import Start
from meshrl.loops.stop import Stop
from meshrl.sync.manifest import Layout

_ECHO_S = 5.0


class Restartable(Protocol):
    """What a job of any loop has."""

    restarts: int
    checkpoints: Checkpoints
    stop: Stop


@contextmanager
def noticed(groups: Groups) -> Iterator[None]:
    """End the block as soon as a failure is known that the groups can't mend by themselves, whatever the block waits
    for; from outside it looks as if that had raised the failure."""
    task, told = asyncio.current_task(), list[RankFailure]()
    assert task is not None

    def hear(failure: RankFailure) -> None:
        if not told:
            task.cancel()
        told.append(failure)

    before, groups.on_failure = groups.on_failure, hear
    try:
        yield
    except (asyncio.CancelledError, RankFailure):
        if not told or task.uncancel() > 0:  # not ours, or not ours alone: the run is to end
            raise
        raise told[0] from None
    finally:
        groups.on_failure = before


async def through_failures(
    job: Restartable,
    groups: Groups,
    record: Record,
    layout: Layout | None,
    restore: Callable[[Start], Awaitable[None]],
    work: Callable[[], Awaitable[None]],
) -> None:
    """Do `work` to its end, from record.start; after each loss of train ranks again, from the newest checkpoint.

    layout: of the syncs, where somebody samples. restore: puts the job, and its trainer, where a checkpoint was made.

    Raises: what restore and `work` raise; a RankFailure that tells of an exception, which would come again, or comes
    before there is a checkpoint, after cluster.max_restarts, or under torchrun, whose --max-restarts is for that. When
    ranks are lost again while new ones start, the first failure is the one that counts.
    """
    start, began = record.start, 0.0
    first: RankFailure | None = None
    most = record.loaded.config.cluster.max_restarts
    while True:
        job.stop.torn = start is not None  # until the trainer holds what the job says
        try:
            with noticed(groups):
                if first is not None:
                    await groups.restart_trainers(layout)
                if start is not None:
                    await restore(start)
                    record.go_on_from(start)
                if first is not None:
                    record.note(f"the train ranks are back after {time.monotonic() - began:.1f} s")
                first, job.stop.torn = None, False
                try:
                    return await work()
                except SyncError:
                    await asyncio.sleep(
                        _ECHO_S
                    )  # it may be the echo of a lost train rank, whose failure ends this wait
                    raise
        except RankFailure as failure:
            if job.stop.signal is not None:  # the run was to end at the end of this very step
                job.stop.torn = True
                raise asyncio.CancelledError from failure
            if first is None:
                first, began = failure, time.monotonic()
            else:
                first.add_note(f"while new train ranks started: {_line(failure)}")
            start = await _next_start(job, groups, record, first, failure)
            job.restarts += 1
            count = f"restart {job.restarts} of {most}"
            record.note(f"{_line(failure)}; starting the train ranks again after step {start.step}, {count}")
            if (stacks := record.keep_stacks(failure)) is not None:
                record.note(f"where every rank stood: {stacks}")


async def _next_start(
    job: Restartable, groups: Groups, record: Record, first: RankFailure, failure: RankFailure
) -> Start:
    """Where to go on from. Raises: `first`, with what stands against going on."""
    if not groups.can_restart_after(failure):
        raise first
    if job.restarts >= record.loaded.config.cluster.max_restarts:
        first.add_note(f"the train ranks were started again {job.restarts} times before it (cluster.max_restarts)")
        raise first
    await job.checkpoints.abandon()
    start = record.newest_start()
    if start is None:
        first.add_note("there is no checkpoint yet to start the train ranks again from")
        raise first
    return start


def _line(failure: RankFailure) -> str:
    return str(failure).splitlines()[0]
