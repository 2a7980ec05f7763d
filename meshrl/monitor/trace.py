"""What a run writes about its time into RUN/traces/, and how it is read back.

controller.json              the run's phases and steps, the ranks with their clocks, and facts about the run
rank_00000.spans.json        one rank's spans and memory
rank_00000.profile.json.gz   torch.profiler's Chrome trace of that rank, of the steps with `traced`

All times are nanoseconds of the unix clock of the process that measured them; `ClockReading` converts a rank's times
to the controller's clock. In a profile, an event begins at baseTimeNanoseconds + 1000 * ts of its rank's unix clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from meshrl.core.errors import DataError
from meshrl.core.files import write_text
from meshrl.monitor.jsonl import data_errors, read_object

FOLDER = "traces"
CONTROLLER = "controller.json"
FORMAT = 1
Category = Literal["phase", "compute", "collective", "copy", "host"]


@dataclass(frozen=True, slots=True)
class Span:
    """phase: a command of the controller, such as train, with the method in args; of commands that overlap, such as
    requests, the time in which at least one was running, and their number in args. Phases contain the other categories.
    compute: forward, backward and optimizer step; it contains the collectives that block it. collective: from its issue
    until its end. copy: moving weights and training states. host: the rank's Python prepares data.

    args of a collective: bytes of the full tensor (the output of an all-gather, the input of a reduce-scatter), the
    dtype, and the number of ranks in its group.
    """

    name: str
    category: Category
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """A rank's memory at the end of a phase. parts: bytes of params, grads, optimizer and buffers, of the steps with
    `traced`; allocated and peak of an accelerator, or resident and peak_resident of a process on a CPU."""

    at_ns: int
    phase: str
    parts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """num_dropped: older spans that were not written, because only the newest ones of a run are."""

    rank: int
    spans: Sequence[Span]
    memory: Sequence[MemorySample] = ()
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the controller, as in time/<phase>_s. step: the one that was running when the phase ended."""

    name: str
    start_ns: int
    end_ns: int
    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """Steps follow each other without gaps, so a step also contains the evaluation, the checkpoint and the start of
    the profiler before it: see BETWEEN_STEPS. traced: torch.profiler was active in all ranks."""

    step: int
    start_ns: int
    end_ns: int
    traced: bool = False


BETWEEN_STEPS = ("eval", "export", "save", "trace")
"""Phases which are part of a step's time and not of its work; trace = the profiler is started or written."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """offset_ns: the rank's clock minus the controller's at at_ns (of the controller). error_ns: half of the round trip
    in which it was measured; the true offset is at most so far away."""

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """device: cpu, or the name of the accelerator. clock: readings at the start of the trace, if it has a start, and at
    its end."""

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


@dataclass(frozen=True, slots=True)
class SyncStages:
    """Seconds of one weight sync by stage (Ack.seconds), of the slowest rank in each, as `receiver` acknowledged it."""

    step: int
    receiver: str
    num_bytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerTrace:
    """facts: kind (train or sft), schedule, executor, num_train_ranks, num_rollout_ranks, sharding_strategy, mesh,
    dtype, max_tokens_per_microbatch, trace_steps, torch; values of a config that may not have all of them."""

    phases: Sequence[Phase]
    steps: Sequence[Step]
    ranks: Mapping[int, RankFacts]
    syncs: Sequence[SyncStages] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def spans_file(rank: int) -> str:
    return f"rank_{rank:05d}.spans.json"


def profile_file(rank: int) -> str:
    return f"rank_{rank:05d}.profile.json.gz"


def write_rank(folder: Path, trace: RankTrace) -> None:
    """Write a rank's spans. Raises: OSError."""
    rows = [[s.name, s.category, s.start_ns, s.end_ns, s.args] for s in trace.spans]
    memory = [[m.at_ns, m.phase, m.parts] for m in trace.memory]
    record = {"format": FORMAT, "rank": trace.rank, "num_dropped": trace.num_dropped, "spans": rows, "memory": memory}
    _write(folder / spans_file(trace.rank), record)


def write_controller(folder: Path, trace: ControllerTrace) -> None:
    """Write the controller's part. Raises: OSError."""
    facts = asdict(trace)
    _write(folder / CONTROLLER, {"format": FORMAT, **facts, "ranks": {str(r): f for r, f in facts["ranks"].items()}})


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text(path, orjson.dumps(record).decode() + "\n")


def read_rank(path: Path) -> RankTrace:
    """Raises: DataError, which names the file."""
    record = _read(path)
    with data_errors(str(path), "a rank's spans"):
        return RankTrace(
            rank=int(record["rank"]),
            spans=[Span(str(n), c, int(start), int(end), dict(args)) for n, c, start, end, args in record["spans"]],
            memory=[MemorySample(int(at), str(phase), dict(parts)) for at, phase, parts in record["memory"]],
            num_dropped=int(record["num_dropped"]),
        )


def read_controller(path: Path) -> ControllerTrace:
    """Raises: DataError, which names the file."""
    record = _read(path)
    with data_errors(str(path), "the controller's part of a trace"):
        ranks = {
            int(rank): RankFacts(**{**facts, "clock": [ClockReading(**reading) for reading in facts["clock"]]})
            for rank, facts in record["ranks"].items()
        }
        return ControllerTrace(
            phases=[Phase(**phase) for phase in record["phases"]],
            steps=[Step(**step) for step in record["steps"]],
            ranks=ranks,
            syncs=[SyncStages(**sync) for sync in record["syncs"]],
            facts=dict(record["facts"]),
        )


def _read(path: Path) -> dict[str, Any]:
    record = read_object(path)
    if record.get("format") != FORMAT:
        raise DataError(f"{path}: format {record.get('format')!r}, but this version of meshrl reads format {FORMAT}")
    return record
