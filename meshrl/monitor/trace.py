"""What a run writes about its time into RUN/traces/, and how it is read back.

controller.json              the run's phases and steps, the ranks with their clocks, and facts about the run
rank_00000.spans.json        one rank's spans and memory
rank_00000.profile.json.gz   torch.profiler's Chrome trace of that rank, of the steps with `traced`

All times are nanoseconds of the unix clock of the process that measured them; `RankFacts.to_controller` converts those
of a rank. In a profile, an event begins at baseTimeNanoseconds + 1000 * ts of its rank's unix clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from meshrl.core.errors import DataError
from meshrl.core.files import write_text
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
    """Bytes at the end of a phase: allocated_bytes of an accelerator and its peak_bytes in the phase, or resident_bytes
    and peak_resident_bytes of a process on a CPU; with the profiler also those of params, grads, optimizer and buffers.
    """

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
