"""Outputs without which a run can continue: a failed write is counted and does not end the run.

These are the terminal, the rollout log, status.json, report.html and similar files, and the trackers. Metrics and
checkpoints are data: an error there ends the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TextIO

from meshrl.core.terminal import counted
from meshrl.core.types import Metric


class FailedWrites:
    """Counts the failed writes of one run by output. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts, self._reasons = Counter[str](), dict[str, str]()
        self._failing = set[str]()  # outputs whose last write has failed
        self._num_taken = 0
        self._thread = ThreadPoolExecutor(1, "writes")
        self._unfinished: Future[None] | None = None  # the last call of `write`, if a thread runs it

    def write(self, output: str, write: Callable[[], None]) -> None:
        """An `attempt` to call `write`, after that of the last call. Called in an event loop, a thread does it, since
        the loop has others to serve."""
        self.wait()

        def attempt() -> None:
            with self.attempt(output):
                write()

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            attempt()
        else:
            self._unfinished = self._thread.submit(attempt)

    def wait(self) -> None:
        """Until the last `write` has ended."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished.result()

    @contextmanager
    def attempt(self, output: str, *also: type[Exception]) -> Iterator[None]:
        """Context for one write to `output`. An OSError ends the block and is counted, as is the ValueError of a closed
        stream and an exception of the types in `also`. All others propagate."""
        caught: tuple[type[Exception], ...] = (OSError, ValueError, *also)
        try:
            yield
        except caught as error:
            if isinstance(error, ValueError) and not isinstance(error, also) and "closed file" not in str(error):
                raise
            with self._lock:
                self._failing.add(output)
                self._counts[output] += 1
                self._reasons[output] = (error.strerror if isinstance(error, OSError) else None) or str(error)
        else:
            with self._lock:
                self._failing.discard(output)

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
        self.wait()
        total = sum(self.counts.values())
        new, self._num_taken = total - self._num_taken, total
        return [Metric(name="monitor/failed_writes", sum=float(new), reduce="sum", unit="writes")]

    def summary(self) -> str | None:
        """A line with all outputs to which a write has failed; None if there are none."""
        with self._lock:
            parts = [f"{o}: {counted(n, 'write')} failed ({self._reasons[o]})" for o, n in self._counts.items()]
        return f"outputs that are not complete: {', '.join(parts)}" if parts else None


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
