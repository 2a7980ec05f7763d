"""A step's wall time by phase; and the newest spans of this process, which are recorded always, and written with
monitor.trace_steps and at the end of a run."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from meshrl.core.types import Metric
from meshrl.monitor.trace import Category, MemorySample, RankTrace, Span

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
