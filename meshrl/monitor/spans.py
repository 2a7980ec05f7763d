"""Where a step's wall time went, by phase name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshrl.core.types import Metric


class Spans:
    """Times phases: `with spans("rollout"): await ...`. For one event loop; phases may overlap and await.

    A phase that several tasks are in at once counts the wall time during which at least one was: its seconds never
    exceed the step's. Device work that was queued and not waited for ends up in the phase that waits.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._inside: dict[str, int] = defaultdict(int)
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the block, also when it raises."""
        if self._inside[phase] == 0:
            self._since[phase] = self._clock()
        self._inside[phase] += 1
        try:
            yield
        finally:
            self._inside[phase] -= 1
            if self._inside[phase] == 0:
                took = self._clock() - self._since[phase]
                self._seconds[phase] = self._seconds.get(phase, 0.0) + took

    def seconds(self, phase: str) -> float:
        """Seconds of a phase since the last `take`, finished blocks only."""
        return self._seconds.get(phase, 0.0)

    def take(self) -> list[Metric]:
        """`time/<phase>_s` of all finished blocks since the last call, which starts a new count."""
        taken, self._seconds = self._seconds, {}
        return [Metric(name=f"time/{p}_s", sum=s, reduce="sum", unit="s") for p, s in taken.items()]
