"""A watch over the controller's own event loop: while a call holds it up, nobody else notices a deadline (P26)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.core.errors import DeadlineError
from meshrl.monitor.spans import latest_span

_BEAT_S = 1.0
_SLACK_S = 10.0
_GRACE_S = 20.0  # for the run to end in good order once it is told
_FRAMES_SHOWN = 8


@contextmanager
def watched(cluster: ClusterConfig) -> Iterator[None]:
    """End the run when one call holds up the running event loop for longer than the phase may take.

    A thread looks on, and raises DeadlineError where the main thread stands, with that place in its text. Where a call
    outside Python can't be interrupted, it says so and ends the process; ranks and reward workers end with it. A run in
    another thread than the main one is not watched: no signal could interrupt it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch, loop = _Watch(cluster), asyncio.get_running_loop()

    def beat() -> None:
        watch.beat = time.monotonic()
        nonlocal timer
        timer = loop.call_later(_BEAT_S, beat)

    timer = loop.call_soon(beat)
    before = signal.signal(signal.SIGUSR1, watch.heard)
    thread = threading.Thread(target=watch.look_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        timer.cancel()


class _Watch:
    def __init__(self, cluster: ClusterConfig):
        self.cluster, self.beat, self.over = cluster, time.monotonic(), threading.Event()
        self._told = ""

    def look_on(self) -> None:
        """The thread's work."""
        while not self.over.wait(_BEAT_S):
            self._told = self._verdict()
            if not self._told:
                continue
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            if self.over.wait(_GRACE_S) or not self._verdict():
                continue
            print(f"meshrl: DeadlineError: {self._told}", file=sys.stderr, flush=True)
            os._exit(1)

    def heard(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, wherever it stands."""
        if self._told and self._verdict():
            raise DeadlineError(self._told)

    def _verdict(self) -> str:
        """What is wrong, with the place; "" while nothing is."""
        phase = _PHASES.get(latest_span(), latest_span())
        known = phase in Deadlines.model_fields
        limit_s = (self.cluster.deadline_s(phase) if known else self.cluster.timeout_s) + _SLACK_S
        held_s = time.monotonic() - self.beat
        if held_s <= limit_s:
            return ""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = "".join(traceback.format_list(traceback.extract_stack(frame)[-_FRAMES_SHOWN:])).rstrip()
        key = f"cluster.deadlines.{phase}, or cluster.timeout_s," if known else "cluster.timeout_s"
        return (
            f"phase {phase or 'start'!r}: one call has held up the controller for {held_s:.0f} s (allowed by {key} and "
            f"{_SLACK_S:g}: {limit_s:g}). Code that waits must be async, or leave the event loop's thread. It stands "
            f"at:\n{place}"
        )


_PHASES = {"save": "checkpoint"}  # spans that have another name than their phase
