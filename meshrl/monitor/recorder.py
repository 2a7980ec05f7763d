"""A step's wall time by phase; and the newest spans of this process, which are recorded always, and written into
RUN/traces/ with monitor.trace_steps and at the end of a run:

controller.json              the run's phases and steps, the ranks with their clocks, and facts about the run
rank_00000.spans.json        one rank's spans and memory
rank_00000.profile.json.gz   torch.profiler's Chrome trace of that rank, of the steps with `traced`

All times are nanoseconds of the unix clock of the process that measured them; `RankFacts.to_controller` converts those
of a rank. In a profile, an event begins at baseTimeNanoseconds + 1000 * ts of its rank's unix clock.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from meshrl.core.errors import DataError
from meshrl.core.files import write_text
from meshrl.core.types import Metric
from meshrl.monitor.jsonl import data_errors, read_object

FOLDER = "traces"
CONTROLLER = "controller.json"
SPANS_FILE, PROFILE_FILE = "rank_{:05d}.spans.json", "rank_{:05d}.profile.json.gz"
BETWEEN_STEPS = ("eval", "export", "save", "trace")
"""Phases in a step's time that are not part of its work; trace = start the profiler, or write traces."""
_FORMAT = 1
_STEP, _SIZES = ("step", "start_ns", "end_ns"), {"bytes", "group"}  # integers of a step, and of a span's args
Category = Literal["phase", "compute", "collective", "copy", "host"]


@dataclass(frozen=True, slots=True)
class Span:
    """phase: a command of the controller, such as train, with the method in args; of commands that overlap, such as
    requests, the time in which at least one was running, with their number `count`. Phases contain the other spans.
    compute: forward, backward and optimizer; collectives that block it are inside. collective: from its issue until its
    end, with `bytes` of the full tensor (output of an all-gather, input of a reduce-scatter), its dtype, and the number
    of ranks `group`. copy: weights and training states. host: the rank's Python prepares data."""

    name: str
    category: Category
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes at the end of a phase: allocated_bytes of an accelerator, or resident_bytes and peak_resident_bytes of a
    process on a CPU; peak_bytes in the phase; with the profiler also those of params, grads, optimizer and buffers."""

    at_ns: int
    phase: str
    parts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """num_dropped: older spans, which are not in the file: a rank keeps only its newest ones."""

    rank: int
    spans: Sequence[Span]
    memory: Sequence[MemorySample] = ()
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the controller, as in time/<phase>_s."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Step:
    """Steps have no gaps between them: an evaluation belongs to the next step's time, see BETWEEN_STEPS. traced: with
    torch.profiler. sync: its metrics sync/* without this prefix, such as cast_s (seconds of the slowest rank)."""

    step: int
    start_ns: int
    end_ns: int
    traced: bool = False
    sync: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClockReading:
    """offset_ns: the rank's clock minus the controller's at at_ns (of the controller). error_ns: half of the round trip
    in which it was measured; the true offset is at most so far away."""

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """device: cpu, or the name of the accelerator. clock: readings at the start of the profiler and at the end."""

    host: str
    device: str
    trains: bool
    samples: bool
    clock: Sequence[ClockReading] = ()

    def to_controller(self, time_ns: int) -> int:
        """A time of this rank on the controller's clock; the offset is interpolated between the readings."""
        if not self.clock:
            return time_ns
        first, last = self.clock[0], self.clock[-1]
        share = (time_ns - first.offset_ns - first.at_ns) / max(1, last.at_ns - first.at_ns)
        drift = (last.offset_ns - first.offset_ns) * min(1.0, max(0.0, share))
        return time_ns - first.offset_ns - round(drift)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerTrace:
    """facts: kind (train or sft), schedule, executor, num_train_ranks, num_rollout_ranks, sharding_strategy, dtype,
    max_tokens_per_microbatch, torch."""

    phases: Sequence[Phase]
    steps: Sequence[Step]
    ranks: Mapping[int, RankFacts]
    facts: Mapping[str, Any] = field(default_factory=dict)


def write_rank(folder: Path, trace: RankTrace) -> None:
    """Write a rank's spans."""
    spans = [[s.name, s.category, s.start_ns, s.end_ns, s.args] for s in trace.spans]
    memory = [[m.at_ns, m.phase, m.parts] for m in trace.memory]
    record = {"rank": trace.rank, "num_dropped": trace.num_dropped, "spans": spans, "memory": memory}
    _write(folder / SPANS_FILE.format(trace.rank), record)


def write_controller(folder: Path, trace: ControllerTrace) -> None:
    """Write the controller's part."""
    _write(folder / CONTROLLER, asdict(trace))


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text(path, orjson.dumps({"format": _FORMAT, **record}, option=orjson.OPT_NON_STR_KEYS).decode() + "\n")


def read_rank(path: Path) -> RankTrace:
    """Raises: DataError, which names the file."""
    record, kinds = _read(path), get_args(Category)
    with data_errors(str(path), "a rank's spans"):
        return RankTrace(
            rank=int(record["rank"]),
            spans=[
                Span(str(n), kinds[kinds.index(c)], int(a), int(b), args | _integers(args, args.keys() & _SIZES))
                for n, c, a, b, args in record["spans"]
            ],
            memory=[
                MemorySample(int(at), str(phase), _integers(parts, parts)) for at, phase, parts in record["memory"]
            ],
            num_dropped=int(record["num_dropped"]),
        )


def read_controller(path: Path) -> ControllerTrace:
    """Raises: DataError, which names the file."""
    record = _read(path)
    with data_errors(str(path), "the controller's part of a trace"):
        return ControllerTrace(
            phases=[Phase(str(p["name"]), int(p["start_ns"]), int(p["end_ns"])) for p in record["phases"]],
            steps=[Step(**{**s, **_integers(s, _STEP), "sync": _finite(s["sync"])}) for s in record["steps"]],
            ranks={
                int(rank): RankFacts(**{**facts, "clock": [ClockReading(**_integers(r, r)) for r in facts["clock"]]})
                for rank, facts in record["ranks"].items()
            },
            facts=dict(record["facts"]),
        )


def _integers(record: Mapping[str, Any], keys: Iterable[str]) -> dict[str, int]:
    return {key: int(record[key]) for key in keys}


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(float(value))}


def _read(path: Path) -> dict[str, Any]:
    record = read_object(path)
    if record.get("format") != _FORMAT:
        raise DataError(f"{path}: format {record.get('format')!r}, but this version of meshrl reads format {_FORMAT}")
    return record


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
        """The largest memory of each phase since the last call: its peak; without one, the memory at its end."""
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
