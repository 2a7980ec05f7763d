"""Where a step's wall time went, by phase name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from meshrl.core.types import Metric

_INNERMOST: ContextVar[str] = ContextVar("span", default="")
_open: list[str] = []


def current_span() -> str:
    """The innermost phase that the running task is in, or was in when it was created; "" outside all."""
    return _INNERMOST.get()


def latest_span() -> str:
    """The phase that any task of this process has entered last and not left; "" outside all."""
    return _open[-1] if _open else ""


class Spans:
    """Times phases: `with spans("rollout"): await ...`. For one event loop; phases may overlap and await.

    A phase that several tasks are in at once counts the wall time during which at least one was: its seconds never
    exceed the step's. Device work that was queued and not waited for ends up in the phase that waits.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, entered: Callable[[str], None] = lambda _: None):
        """entered: told the phase that the run is in, at each change; "" between two phases."""
        self._clock, self._entered = clock, entered
        self._inside: dict[str, int] = defaultdict(int)
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the block, also when it raises."""
        if self._inside[phase] == 0:
            self._since[phase] = self._clock()
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
            self._entered(latest_span())

    def seconds(self, phase: str) -> float:
        """Seconds of a phase since the last `take`, finished blocks only."""
        return self._seconds.get(phase, 0.0)

    def take(self) -> list[Metric]:
        """`time/<phase>_s` of all finished blocks since the last call, which starts a new count."""
        taken, self._seconds = self._seconds, {}
        return [Metric(name=f"time/{p}_s", sum=s, reduce="sum", unit="s") for p, s in taken.items()]
