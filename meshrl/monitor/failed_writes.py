"""Outputs without which a run can continue: a failed write is counted and does not end the run.

These are the terminal, the rollout log, status.json, report.html and similar files, and the trackers. Metrics and
checkpoints are data: an error there ends the run.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from meshrl.core.types import Metric


@dataclass(slots=True)
class _Outage:
    """Failed writes in succession to one output, and the reason of the last one."""

    count: int
    reason: str


class FailedWrites:
    """Counts the failed writes of one run by output. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock, self._lock = clock, threading.Lock()
        self._counts, self._reasons = Counter[str](), dict[str, str]()
        self._failing: dict[str, _Outage] = {}
        self._recovered: list[str] = []
        self._num_taken = 0

    @contextmanager
    def attempt(self, output: str, *also: type[Exception]) -> Iterator[None]:
        """Context for one write to `output`. An OSError ends the block and is counted, as is the ValueError of a closed
        stream and an exception of the types in `also`. All others propagate."""
        caught: tuple[type[Exception], ...] = (OSError, ValueError, *also)
        try:
            yield
        except caught as error:
            if isinstance(error, ValueError) and "closed file" not in str(error):
                raise
            self._failed(output, (error.strerror if isinstance(error, OSError) else None) or str(error))
        else:
            self._succeeded(output)

    def _failed(self, output: str, reason: str) -> None:
        with self._lock:
            outage = self._failing.setdefault(output, _Outage(0, reason))
            outage.count, outage.reason = outage.count + 1, reason
            self._counts[output] += 1
            self._reasons[output] = reason

    def _succeeded(self, output: str) -> None:
        if output not in self._failing:
            return
        with self._lock:
            outage = self._failing.pop(output, None)
            if outage is not None:
                since = time.strftime("%F %T", time.localtime(self._clock()))
                self._recovered.append(f"{output} is written again since {since}; before that, {_text(outage)}")

    @property
    def counts(self) -> dict[str, int]:
        """The failed writes so far, by output; empty if there are none."""
        with self._lock:
            return dict(self._counts)

    def is_failing(self, output: str) -> bool:
        """Whether the last write to this output has failed."""
        return output in self._failing

    def take(self) -> list[Metric]:
        """`monitor/failed_writes`: the failed writes to all outputs since the last call."""
        total = sum(self.counts.values())
        new, self._num_taken = total - self._num_taken, total
        return [Metric(name="monitor/failed_writes", sum=float(new), reduce="sum", unit="writes")]

    def recovered(self) -> list[str]:
        """A line for each output that works again since the last call."""
        with self._lock:
            lines, self._recovered = self._recovered, []
        return lines

    def summary(self) -> str | None:
        """A line with all outputs to which a write has failed; None if there are none."""
        with self._lock:
            parts = [f"{output}: {_text(_Outage(n, self._reasons[output]))}" for output, n in self._counts.items()]
        return f"outputs that are not complete: {', '.join(parts)}" if parts else None


def _text(outage: _Outage) -> str:
    return f"{outage.count} write{'' if outage.count == 1 else 's'} failed ({outage.reason})"


class GuardedStream:
    """A text stream for the terminal whose failed writes are counted as those of the output `terminal`. Characters that
    its encoding does not have are escaped."""

    def __init__(self, stream: TextIO, writes: FailedWrites):
        self._stream, self._writes = stream, writes
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with self._writes.attempt("terminal"):
            self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            self._stream.flush()  # only then it has been written: one attempt, not two
        return len(text)

    def flush(self) -> None:
        """`write` has done it."""

    def isatty(self) -> bool:
        with self._writes.attempt("terminal"):
            return self._stream.isatty()
        return False
