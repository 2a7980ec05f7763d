"""Ctrl-C and SIGTERM: a run ends with a checkpoint of its last finished step."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from meshrl.cluster.groups import TrainGroup
from meshrl.core.errors import RankFailure
from meshrl.run.checkpoints import Checkpoints

GRACE_S = 4.0  # after Ctrl-C, for the running command of the ranks; saving and ending take a few seconds more
_LAST_SAVE_S = 1.0  # for a checkpoint that is almost complete


class Stop:
    """Turns a signal into the cancellation of one task, at a time when trainer and controller agree on the step.

    Inside `updating`, once the weights have changed, and inside `saving`, the task is cancelled at the end of the
    block. Everywhere else it is cancelled at once, because the trainer still has the weights of the last finished step.

    After Ctrl-C, an update gets at most GRACE_S, if there is a checkpoint (can_fall_back). SIGTERM has no such limit:
    the scheduler that sends it has its own limit. trainer_is_valid: the trainer has the weights of a finished step, or
    will have them at the end of the block; otherwise no checkpoint can be saved.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.trainer_is_valid = True
        self.can_fall_back: Callable[[], bool] = lambda: False
        self._task: asyncio.Task[Any] | None = None
        self._updates: list[Callable[[], bool]] = []  # for each running update: whether the weights have changed
        self._num_saves = 0

    @property
    def is_urgent(self) -> bool:
        """Whether the run must end soon."""
        return self.signal == signal.SIGINT and self.can_fall_back()

    def request(self, number: int) -> None:
        """Cancel the task, now or at the end of the block that delays it."""
        self.signal = number
        if self._task is None:
            return
        if not self._is_delayed():
            self._task.cancel()
        elif self.is_urgent:
            self._task.get_loop().call_later(GRACE_S, self._interrupt_update)

    def _is_delayed(self) -> bool:
        return self._num_saves > 0 or any(changed() for changed in self._updates)

    def _interrupt_update(self) -> None:
        if self._task is not None and self._is_delayed() and not self._num_saves:
            self.trainer_is_valid = False
            self._task.cancel()

    @contextmanager
    def updating(self, trainer: TrainGroup) -> Iterator[None]:
        """Context of one step's update: no signal interrupts it after its first optimizer step, which changes the
        weights. Raises: CancelledError at its end, if the end of the run was requested meanwhile."""
        before = trainer.num_optim_steps

        def changed() -> bool:
            return trainer.num_optim_steps > before

        self._updates.append(changed)
        try:
            yield
        finally:
            self._updates.remove(changed)
        self._end_if_requested()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of a save: no signal interrupts it. Raises: as `updating`."""
        self._num_saves += 1
        try:
            yield
        finally:
            self._num_saves -= 1
        self._end_if_requested()

    def _end_if_requested(self) -> None:
        if self.signal is not None and not self._is_delayed():
            raise asyncio.CancelledError

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM for the running task. A second Ctrl-C ends it at once. Only the main thread
        receives signals: a run in another thread handles none."""
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
        first: list[int] = []

        def handle(number: int, frame: FrameType | None) -> None:
            # Only `request` sets self.signal: else a block that ends before `request` runs would cancel the task twice.
            if not first:
                first.append(number)
                loop.call_soon_threadsafe(self.request, number)
            elif number == signal.SIGINT:
                raise KeyboardInterrupt

        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def save_at_the_end(
    stop: Stop, checkpoints: Checkpoints, step: int, save: Callable[[], Awaitable[None]], note: Callable[[str], None]
) -> None:
    """The end of an interrupted run: save its last finished step, or report the last checkpoint.

    Waits for the running command of the ranks, after Ctrl-C at most GRACE_S.
    """
    if stop.trainer_is_valid and step in (0, checkpoints.newest_on_disk()):
        note(f"interrupted after step {step}" + (", which is saved" if step else "; there is nothing to save yet"))
        return
    if stop.trainer_is_valid:
        note(f"interrupted; ending with a checkpoint of step {step}")
        try:
            async with asyncio.timeout(GRACE_S if stop.is_urgent else None):
                await checkpoints.trainer.idle()
        except (TimeoutError, RankFailure):
            pass
        else:
            await save()
            return
    await checkpoints.abandon(_LAST_SAVE_S)
    last = checkpoints.saved_step
    ends_with = f"its last checkpoint, after step {last}" if last else "no checkpoint"
    note(f"the ranks are in the middle of a step, which is not saved; the run ends with {ends_with}")
