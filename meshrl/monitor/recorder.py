"""The newest spans of this process: recorded always, written with monitor.trace_steps and at the end of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from meshrl.core.types import Metric
from meshrl.monitor.trace import Category, MemorySample, RankTrace, Span

RING, TRACED = 4096, 1 << 18  # spans in memory, about 250 bytes each; TRACED: from the start of the profiler
_TRAINING = ("annotate", "train", "optim")


class Recorder:
    """Spans, memory samples, and the time of the current step's collectives. measure: returns the parts of a
    MemorySample. annotate: while torch.profiler is active, the context that marks a span in its trace."""

    def __init__(self, size: int = RING):
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.measure: Callable[[], dict[str, int]] = dict
        self.phase = ""  # the running command that blocks this rank
        self.clear(size)

    def clear(self, size: int = RING) -> None:
        """Forget everything, and keep at most this number of spans from now on."""
        self._spans: deque[Span] = deque(maxlen=size)
        self._memory: deque[MemorySample] = deque(maxlen=size // 4)
        self._phase_memory: dict[str, int] = {}
        self._num_spans = self._train_ns = 0
        self._running: dict[str, list[int]] = {}  # by method: running calls, calls, start_ns
        self._collectives: list[tuple[int, int]] = []  # of the training phases since `step_metrics`

    def add(self, name: str, category: Category, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        self._spans.append(Span(name, category, start_ns, end_ns, args))
        self._num_spans += 1
        if category == "collective" and args.get("phase") in _TRAINING:
            self._collectives.append((start_ns, end_ns))
        elif category == "phase" and name in _TRAINING:
            self._train_ns += end_ns - start_ns

    @contextmanager
    def span(self, name: str, category: Category, **args: Any) -> Iterator[None]:
        """Record the block on the host's clock, also when it raises."""
        outer, start_ns = self.phase, time.time_ns()
        if category == "phase":
            self.phase = name
        try:
            with self.annotate(name):
                yield
        finally:
            self.phase = outer
            self.add(name, category, start_ns, time.time_ns(), args)
            if category == "phase":
                self.sample(name)

    @contextmanager
    def overlapping(self, phase: str, method: str) -> Iterator[None]:
        """Record the time in which at least one call of this method runs, as one span."""
        running = self._running.setdefault(method, [0, 0, 0])
        if not running[0]:
            running[1:] = 0, time.time_ns()
        running[0] += 1
        running[1] += 1
        try:
            yield
        finally:
            running[0] -= 1
            if not running[0]:
                self.add(phase, "phase", running[2], time.time_ns(), {"method": method, "count": running[1]})
                self.sample(phase)

    def sample(self, phase: str) -> None:
        """Record the memory at the end of a phase."""
        parts = self.measure()
        self._memory.append(MemorySample(time.time_ns(), phase, parts))
        size = parts.get("peak_bytes", parts.get("resident_bytes"))  # of an accelerator, or of a process on a CPU
        if size is not None:
            self._phase_memory[phase] = max(size, self._phase_memory.get(phase, 0))

    def take_memory(self) -> dict[str, int]:
        """The largest memory of each phase since the last call: its peak on an accelerator; on a CPU, the resident
        memory at its end."""
        taken, self._phase_memory = self._phase_memory, {}
        return taken

    @property
    def train_s(self) -> float:
        """Seconds of the training phases since `step_metrics`."""
        return self._train_ns / 1e9

    def trace(self, rank: int) -> RankTrace:
        num_dropped = self._num_spans - len(self._spans)
        return RankTrace(rank=rank, spans=list(self._spans), memory=list(self._memory), num_dropped=num_dropped)

    def step_metrics(self, blocking: bool) -> list[Metric]:
        """perf/compute_comm_ratio and perf/exposed_comm_fraction of the training since the last call; none without
        communication. blocking: a collective blocks its rank. Else only a profile shows which part of it is exposed,
        and the ratio is that of training time to communication."""
        intervals, train_ns = sorted(self._collectives), self._train_ns
        self._collectives, self._train_ns = [], 0
        comm_ns = last = 0
        for start, end in intervals:
            comm_ns += max(0, end - max(start, last))
            last = max(last, end)
        if not comm_ns or not train_ns:
            return []
        exposed_ns = comm_ns if blocking else 0
        ratio = max(0, train_ns - exposed_ns) / comm_ns
        exposed = Metric(name="perf/exposed_comm_fraction", sum=exposed_ns, weight=train_ns, unit="fraction")
        return [Metric(name="perf/compute_comm_ratio", sum=ratio, unit="none"), *([exposed] if blocking else [])]


recorder = Recorder()
"""Of this process: a rank, or with executor inline the entire run."""
