"""Ctrl-C, SIGTERM, SIGUSR2 and SIGHUP: a run ends with a checkpoint of its last finished step."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from meshrl.loops.job import Resumable
from meshrl.process.spawn import STOPS

GRACE_S = 4.0  # after Ctrl-C, for the running command of the ranks; saving and ending take a few seconds more


class Stop:
    """Turns a signal into the cancellation of one task, at a time when trainer and controller agree on the step.

    Inside `updating`, once the weights have changed, and inside `saving`, the task is cancelled at the end of the
    block. Everywhere else it is cancelled at once, because the trainer still has the weights of the last finished step.

    After Ctrl-C, an update gets at most GRACE_S, if there is a checkpoint (can_fall_back). SIGTERM and SIGUSR2 have
    no such limit, because the scheduler that sends them has its own, and neither has SIGHUP, which means a lost
    terminal. trainer_is_valid: the trainer has the weights of a finished step, or will have them at the end of the
    block; otherwise no checkpoint can be saved.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.trainer_is_valid = True
        self.can_fall_back: Callable[[], bool] = lambda: False
        self.is_of_command: Callable[[], bool] = lambda: False  # whether `meshrl stop` has sent the signal
        self._task: asyncio.Task[Any] | None = None
        self._has_changed: Callable[[], bool] = lambda: False  # whether the running update has changed the weights
        self._num_delays = 0  # open blocks that no signal interrupts

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
        return self._num_delays > 0 or self._has_changed()

    def _interrupt_update(self) -> None:
        if self._task is not None and self._has_changed() and not self._num_delays:
            self._task.cancel()  # `updating` then marks the trainer as invalid

    @contextmanager
    def updating(self, job: Resumable) -> Iterator[None]:
        """Context of one step's update: no signal interrupts it after its first optimizer step, which changes the
        weights. An error in it leaves the trainer invalid, unless the step was counted before the error.

        Raises: CancelledError at its end, if the end of the run was requested meanwhile.
        """
        optim_steps, step = job.trainer.num_optim_steps, job.step
        self._has_changed = lambda: job.trainer.num_optim_steps > optim_steps
        try:
            yield
        except BaseException:
            self.trainer_is_valid &= not self._has_changed() or job.step > step
            raise
        finally:
            self._has_changed = lambda: False
        self._end_if_requested()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of a save: no signal interrupts it. Raises: as `updating`."""
        with self.delayed():
            yield
        self._end_if_requested()

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """No signal interrupts this block, nor ends the run after it."""
        self._num_delays += 1
        try:
            yield
        finally:
            self._num_delays -= 1

    def _end_if_requested(self) -> None:
        if self.signal is not None and not self._is_delayed():
            raise asyncio.CancelledError

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and STOPS for the running task. A second Ctrl-C ends it at once. SIGHUP stays ignored
        under nohup. Only the main thread receives signals: a run in another thread handles none."""
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
        first: list[int] = []

        def handle(number: int, frame: FrameType | None) -> None:
            # Only `request` sets self.signal: else a block that ends before `request` runs would cancel the task twice.
            if not first:
                first.append(number)
                loop.call_soon_threadsafe(self.request, number)
            elif number == signal.SIGINT:
                raise KeyboardInterrupt

        is_main = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGINT, *STOPS] if is_main else []
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            numbers = numbers[:-1]
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
