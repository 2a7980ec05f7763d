"""The loop of a run until its end. A run that loses train ranks starts new ones and continues from its last checkpoint;
ranks that only sample, reward workers and the loaded task are kept. A run that ends early saves a checkpoint."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

from meshrl.cluster.launch import Groups
from meshrl.core.errors import CheckpointError, MeshrlError, RankFailure, SyncError
from meshrl.loops.job import Resumable
from meshrl.run.folder import Start, changed_keys, newest_start
from meshrl.run.keeper import Keeper
from meshrl.run.outputs import LiveRun
from meshrl.run.signals import GRACE_S
from meshrl.sync.layout import Layout

_IDLE_S = 60.0  # after an error, for the running command of the ranks; some of them may wait for ever


async def run_to_end(
    run: LiveRun,
    keeper: Keeper,
    job: Resumable,
    groups: Groups,
    layout: Layout | None,
    loop: Callable[[], Awaitable[None]],
) -> None:
    """Run the loop of `job` from run.start to its end. After a loss of train ranks, new ones continue from the last
    checkpoint; a run without one begins again, unless it saves none. A run that is ended by a signal or by an error
    saves a checkpoint of its last finished step. At the end the last checkpoint is on disk.

    layout: of the syncs, if the run samples.
    """
    cfg = run.loaded.config
    start, origin = run.start, run.start or Start(0, None, job.snapshot())
    first: RankFailure | None = None
    has_begun, lost_at = False, 0.0

    async def run_from_start() -> None:
        nonlocal first, has_begun
        if first is not None:
            await groups.restart_trainers(layout)
        if start is not None:
            await _restore(run, job, start, first is not None or cfg.run.resume == "auto")
        if first is not None:
            run.out.note(f"the train ranks were restarted in {time.monotonic() - lost_at:.1f} s")
        run.stop.mark_trainer(True)
        first, has_begun = None, True
        try:
            await loop()
        except SyncError:
            await asyncio.sleep(5.0)  # if a lost train rank is the cause, its failure ends this wait
            raise
        if not job.is_over:
            raise MeshrlError(
                f"the loop ended after step {job.step}, which is not the last one of the config. The cause is an error "
                "in meshrl; run.resume=auto continues from the last checkpoint"
            )

    try:
        while True:
            run.stop.mark_trainer(start is None)  # else False until the trainer has loaded the checkpoint
            try:
                return await groups.until_failure(run_from_start())
            except RankFailure as failure:
                if run.stop.signal is not None:  # the run would have ended after this step
                    run.stop.mark_trainer(False)
                    raise asyncio.CancelledError from failure
                if first is None:
                    first, lost_at = failure, time.monotonic()
                else:
                    first.add_note(f"while new train ranks started: {str(failure).splitlines()[0]}")
                start = await _next_start(run, keeper, groups, first, failure, origin)
    except asyncio.CancelledError:
        must_be_soon = run.stop.signal == signal.SIGINT and keeper.checkpoints.newest_on_disk() > 0
        await _save_at_the_end(run, keeper, job, "interrupted", GRACE_S if must_be_soon else None)
        raise
    except Exception as error:
        if has_begun and not isinstance(error, RankFailure):
            try:
                with run.stop.delayed():  # the run ends with its error
                    await _save_at_the_end(run, keeper, job, f"ended by {type(error).__name__}", _IDLE_S)
            except Exception as failed:
                if str(failed) != str(error):
                    error.add_note(f"the state after step {job.step} could not be saved: {failed}")
        raise


async def _save_at_the_end(run: LiveRun, keeper: Keeper, job: Resumable, how: str, wait_s: float | None) -> None:
    """Save the last finished step of a run that ends early, or report the last checkpoint. how: it ended. wait_s: for
    the running command of the ranks; None = without limit."""
    saves = run.objects.saves
    if run.stop.trainer_is_valid and (not saves or job.step in (0, keeper.checkpoints.newest_on_disk())):
        saved = ", which is saved" if saves and job.step else "; there is nothing to save"
        run.out.note(f"{how} after step {job.step}{saved}")
        return
    if run.stop.trainer_is_valid:
        run.out.note(f"{how}; ending with a checkpoint of step {job.step}")
        try:
            async with asyncio.timeout(wait_s):
                await job.trainer.state_bytes()  # any command: it waits for the end of the running one
        except (TimeoutError, RankFailure):
            pass
        else:
            if not keeper.checkpoints.is_writing:  # it may have failed, and its error was raised
                await keeper.checkpoints.abandon()
            await keeper.save(job)
            return
    await keeper.checkpoints.abandon(1.0)  # for a checkpoint that is almost complete
    last = keeper.checkpoints.newest_on_disk()
    ends_with = f"its last checkpoint, after step {last}" if last else "no checkpoint"
    run.out.note(f"{how} in the middle of a step, which is not saved; the run ends with {ends_with}")


async def _restore(run: LiveRun, job: Resumable, start: Start, may_fall_back: bool) -> None:
    """Set the job, its trainer and the run's folder to the state of `start`, or if it is damaged and may_fall_back, to
    that of the newest older checkpoint of the run that is not.
    """
    first: CheckpointError | None = None
    chosen: Start | None = start
    while chosen is not None:
        try:
            await job.restore(chosen.step, chosen.saved, chosen.folder)
            if chosen.folder is not None:
                run.out.note(f"continues from {chosen.folder}, after step {chosen.step}")
                for line in changed_keys(chosen.saved["config"], run.loaded.config.model_dump(mode="json")):
                    run.out.note(f"  {line}")
            return run.out.continue_from(chosen)
        except CheckpointError as damage:
            first = first or damage
            if not (may_fall_back and chosen.is_of(run.folder)):
                break
            run.out.note(f"checkpoint passed over: {damage}")
            chosen = newest_start(run.folder, run.kind, run.num_steps, run.out.note, before=chosen.step)
    assert first is not None
    raise first


async def _next_start(
    run: LiveRun, keeper: Keeper, groups: Groups, first: RankFailure, failure: RankFailure, origin: Start
) -> Start:
    """The state from which new train ranks continue; the restart is counted and noted."""
    if not groups.can_restart_after(failure):
        raise first
    if keeper.restarts >= run.loaded.config.cluster.max_restarts:
        first.add_note(
            f"the train ranks are not restarted again: restarts so far {keeper.restarts}, cluster.max_restarts "
            f"{run.loaded.config.cluster.max_restarts}. Raise it, or continue the run with run.resume=auto"
        )
        raise first
    await keeper.checkpoints.abandon()
    try:
        start = newest_start(run.folder, run.kind, run.num_steps, run.out.note) or origin
    except CheckpointError as damage:
        first.add_note(f"the train ranks can't be restarted: {damage}")
        raise first from None
    if start.folder is None and run.save_every_steps == 0:
        first.add_note(
            f"the train ranks can't be restarted, because no training state was saved: {run.save_key} is 0. Remove "
            "this key to save the state at each evaluation and every ten minutes, or set a number of steps"
        )
        raise first
    keeper.count_restart()
    count = f"restart {keeper.restarts} of {run.loaded.config.cluster.max_restarts}"
    run.out.note(f"{str(failure).splitlines()[0]}; starting the train ranks again after step {start.step}, {count}")
    if (stacks := run.out.keep_stacks(failure)) is not None:
        run.out.note(f"the stacks of all ranks at the failure: {stacks}")
    return start
