"""Ctrl-C and SIGTERM: a run ends in good order, with a checkpoint of its last finished step."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """Turns a signal into the end of one task, at a moment when trainer and controller agree on the step.

    Inside `held` the weights are between two steps: the end waits for the block's. Everywhere else the task is
    cancelled where it stands, for the trainer still is as the last finished step left it.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._task: asyncio.Task[Any] | None = None
        self._held = 0

    def ask(self, number: int) -> None:
        """End the task, now or at the end of the block that holds it."""
        self.signal = number
        if self._task is not None and not self._held:
            self._task.cancel()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Not to be interrupted. Raises: CancelledError at its end, if the end was asked for meanwhile."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.signal is not None and not self._held:
            raise asyncio.CancelledError

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear SIGINT and SIGTERM for the running task, and from the main thread. A second Ctrl-C does not wait."""
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()

        def heard(number: int, frame: FrameType | None) -> None:
            if self.signal is None:
                self.signal = number
                loop.call_soon_threadsafe(self.ask, number)
            elif number == signal.SIGINT:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
