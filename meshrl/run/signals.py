"""The event loop of a run and what ends it: Ctrl-C, SIGTERM, SIGUSR2 and SIGHUP, after which a run saves a checkpoint
of its last finished step, and a watchdog, because no deadline can be noticed while one call blocks the loop."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.core.terminal import print_message
from meshrl.loops.job import Resumable
from meshrl.monitor.status import STOP_FILE
from meshrl.process.spawn import STOPS

GRACE_S = 4.0  # after Ctrl-C, for the running command of the ranks; saving and ending take a few seconds more

_BEAT_S = 5.0  # of the watchdog
_STDERR = 2  # sys.stderr of a notebook has no file
_END_S = 5.0  # after the end of a run, for tasks that an agent has started and that are cancelled
T = TypeVar("T")


class Stop:
    """Turns a signal into the cancellation of one task, at a time when trainer and controller agree on the step.

    Inside `updating`, once the weights have changed, and inside `saving`, the task is cancelled at the end of the
    block. Everywhere else it is cancelled at once, because the trainer still has the weights of the last finished step.

    After Ctrl-C, an update gets at most GRACE_S, if there is a checkpoint. SIGTERM and SIGUSR2 have no such limit,
    because the scheduler that sends them has its own, and neither has SIGHUP, which means a lost terminal.
    trainer_is_valid: the trainer has the weights of a finished step, or will have them at the end of the block;
    otherwise no checkpoint can be saved.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.trainer_is_valid = True
        self._folder: Path | None = None
        self._can_fall_back: Callable[[], bool] = lambda: False  # whether there is a checkpoint, in an update
        self._task: asyncio.Task[Any] | None = None
        self._has_changed: Callable[[], bool] = lambda: False  # whether the running update has changed the weights
        self._num_delays = 0  # open blocks that no signal interrupts

    def is_in(self, folder: Path) -> None:
        """The run writes to this folder."""
        self._folder = folder

    @property
    def is_of_command(self) -> bool:
        """Whether `meshrl stop` has sent the signal."""
        return self._folder is not None and (self._folder / STOP_FILE).is_file()

    def mark_trainer(self, is_valid: bool) -> None:
        """Record whether the trainer has the weights of a finished step."""
        self.trainer_is_valid = is_valid

    def request(self, number: int) -> None:
        """Cancel the task, now or at the end of the block that delays it."""
        self.signal = number
        if self._task is None:
            return
        if not self._is_delayed():
            self._task.cancel()
        elif number == signal.SIGINT and self._can_fall_back():
            self._task.get_loop().call_later(GRACE_S, self._interrupt_update)

    def _is_delayed(self) -> bool:
        return self._num_delays > 0 or self._has_changed()

    def _interrupt_update(self) -> None:
        if self._task is not None and self._has_changed() and not self._num_delays:
            self._task.cancel()  # `updating` then marks the trainer as invalid

    @contextmanager
    def updating(self, job: Resumable, can_fall_back: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Context of one step's update: no signal interrupts it after its first optimizer step, which changes the
        weights. An error in it leaves the trainer invalid, unless the step was counted before the error. can_fall_back:
        whether there is a checkpoint.
        """
        optim_steps, step = job.trainer.num_optim_steps, job.step
        self._has_changed = lambda: job.trainer.num_optim_steps > optim_steps
        self._can_fall_back = can_fall_back
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
        """Context of a save: no signal interrupts it."""
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


def run_in_own_loop(main: Coroutine[Any, Any, T], owner: str = "the run") -> T:
    """asyncio.run that also works where a loop already runs in this thread, as in a notebook; that loop waits
    meanwhile. The run is in the caller's thread: Ctrl-C is a signal, which only the main thread
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
    """End this process when one call blocks the running event loop for longer than any phase may take, and print the
    stacks of all threads to stderr. Ranks and reward workers end with it. The timer needs neither the event loop nor
    the interpreter's lock, so a call into C code that keeps the lock is found, too."""
    limit_s = max(cluster.timeout_s, *map(cluster.deadline_s, Deadlines.model_fields)) + 2 * _BEAT_S
    loop, timer = asyncio.get_running_loop(), list[asyncio.Handle]()

    def beat() -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
        timer[:] = [loop.call_later(_BEAT_S, beat)]

    beat()
    try:
        yield
    finally:
        timer.pop().cancel()
        faulthandler.cancel_dump_traceback_later()
