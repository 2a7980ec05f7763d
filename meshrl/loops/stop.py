"""Ctrl-C and SIGTERM: a run ends in good order, with a checkpoint of its last finished step."""

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
from meshrl.loops.checkpoints import Checkpoints

PATIENCE_S = 4.0  # after Ctrl-C, for what the ranks are busy with; saving and ending take a few seconds more
_LAST_WORDS_S = 1.0  # for a checkpoint that is all but written


class Stop:
    """Turns a signal into the end of one task, at a moment when trainer and controller agree on the step.

    Inside `updating`, once the weights have moved, and inside `saving` the end waits for the block's. Everywhere else
    the task is cancelled where it stands, for the trainer still is as the last finished step left it.

    Ctrl-C waits for an update for PATIENCE_S at most, if there is a checkpoint to fall back on (can_fall_back);
    SIGTERM comes from schedulers that know how long they wait. torn: the trainer is not, and will not be, as a finished
    step left it, so there is nothing to save.

    after_step: the run ends with the step that is under way as if it were the last one of its config, with evaluation,
    model and checkpoint. A caller's on_step asks for that.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.torn = False
        self.after_step = False
        self.can_fall_back: Callable[[], bool] = lambda: False
        self._task: asyncio.Task[Any] | None = None
        self._updates: list[Callable[[], bool]] = []  # whether the weights have moved, of each update under way
        self._num_saves = 0

    @property
    def in_haste(self) -> bool:
        """Whether the end must not wait for long."""
        return self.signal == signal.SIGINT and self.can_fall_back()

    def ask(self, number: int) -> None:
        """End the task, now or at the end of the block that holds it."""
        self.signal = number
        if self._task is None:
            return
        if not self._is_held():
            self._task.cancel()
        elif self.in_haste:
            self._task.get_loop().call_later(PATIENCE_S, self._cut)

    def _is_held(self) -> bool:
        return self._num_saves > 0 or any(moved() for moved in self._updates)

    def _cut(self) -> None:
        if self._task is not None and self._is_held() and not self._num_saves:
            self.torn = True
            self._task.cancel()

    @contextmanager
    def updating(self, trainer: TrainGroup) -> Iterator[None]:
        """One step's update: not to be interrupted from its first optimizer step on, which is what moves the weights.
        Raises: CancelledError at its end, if the end of the run was asked for meanwhile."""
        before = trainer.num_optim_steps

        def moved() -> bool:
            return trainer.num_optim_steps > before

        self._updates.append(moved)
        try:
            yield
        finally:
            self._updates.remove(moved)
        self._end_if_asked()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Not to be interrupted at all. Raises: as `updating`."""
        self._num_saves += 1
        try:
            yield
        finally:
            self._num_saves -= 1
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self.signal is not None and not self._is_held():
            raise asyncio.CancelledError

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear SIGINT and SIGTERM for the running task. A second Ctrl-C does not wait. Signals reach the main thread
        alone: a run in another one hears none."""
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
        first: list[int] = []

        def heard(number: int, frame: FrameType | None) -> None:
            """Only `ask` makes it known: a block that ended the task before it would have the task cancelled twice."""
            if not first:
                first.append(number)
                loop.call_soon_threadsafe(self.ask, number)
            elif number == signal.SIGINT:
                raise KeyboardInterrupt

        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, heard) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def save_at_the_end(
    stop: Stop,
    checkpoints: Checkpoints,
    step: int,
    save: Callable[[], Awaitable[None]],
    note: Callable[[str], None],
) -> None:
    """What an interrupted run does last: save its last finished step, or say which checkpoint it ends with.

    Waits for: the command that the ranks are in the middle of, at most PATIENCE_S after Ctrl-C.
    """
    if not stop.torn and step in (0, checkpoints.newest_on_disk()):
        note(f"interrupted after step {step}" + (", which is saved" if step else "; there is nothing to save yet"))
        return
    if not stop.torn:
        note(f"interrupted; ending with a checkpoint of step {step}")
        try:
            async with asyncio.timeout(PATIENCE_S if stop.in_haste else None):
                await checkpoints.trainer.idle()
        except (TimeoutError, RankFailure):
            pass
        else:
            await save()
            return
    await checkpoints.abandon(_LAST_WORDS_S)
    last = checkpoints.saved_step
    ends_with = f"its last checkpoint, after step {last}" if last else "no checkpoint of its own"
    note(f"the ranks hold no finished step and are not waited for; the run ends with {ends_with}")
