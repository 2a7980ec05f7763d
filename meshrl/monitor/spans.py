"""A step's wall time by phase."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from meshrl.core.types import Metric

_INNERMOST: ContextVar[str] = ContextVar("span", default="")
_open: list[str] = []


def current_span() -> str:
    """The innermost phase of the running task, or the phase in which it was created; "" outside all phases."""
    return _INNERMOST.get()


def latest_span() -> str:
    """The last phase that a task of this process has entered and not left yet; "" outside all phases."""
    return _open[-1] if _open else ""


class Spans:
    """Measures phases: `with spans("rollout"): await ...`. For one event loop; phases may overlap and await.

    If several tasks are in the same phase, it counts the wall time during which at least one task was in it, so its
    seconds never exceed the step's. Queued device work counts in the phase that waits for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, entered: Callable[[str], None] = lambda _: None):
        """entered: called with the new phase at each change; "" between two phases."""
        self._clock, self._entered = clock, entered
        self._inside: dict[str, int] = defaultdict(int)
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._start_ns: dict[str, int] = {}
        self.intervals: deque[tuple[str, int, int]] = deque(maxlen=4096)  # phase, start and end in unix ns; the newest

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the block, also when it raises."""
        if self._inside[phase] == 0:
            self._since[phase], self._start_ns[phase] = self._clock(), time.time_ns()
        self._inside[phase] += 1
        outer = _INNERMOST.set(phase)
        _open.append(phase)
        self._entered(phase)
        try:
            yield
        finally:
            _INNERMOST.reset(outer)
            _open.remove(phase)
            self._inside[phase] -= 1
            if self._inside[phase] == 0:
                took = self._clock() - self._since[phase]
                self._seconds[phase] = self._seconds.get(phase, 0.0) + took
                self.intervals.append((phase, self._start_ns[phase], time.time_ns()))
            self._entered(latest_span())

    def seconds(self, phase: str) -> float:
        """Seconds of a phase since the last `take`, up to now if a block is open."""
        now = self._clock() - self._since[phase] if self._inside[phase] else 0.0
        return self._seconds.get(phase, 0.0) + now

    def take(self, phase: str | None = None) -> list[Metric]:
        """`time/<phase>_s` since the last call, up to now for open blocks; resets the times. phase: only this one."""
        taken = {name: self.seconds(name) for name in self._since if phase in (None, name)}
        for name in taken:
            self._seconds.pop(name, None)
            del self._since[name]
            if self._inside[name]:
                self._since[name] = self._clock()
        return [Metric(name=f"time/{p}_s", sum=s, reduce="sum", unit="s") for p, s in taken.items()]
