"""Diagnosis: all numbers of a trace, and the files that hold them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from meshrl.core.files import output_errors
from meshrl.monitor.trace import BETWEEN_STEPS
from meshrl.tools.diagnose import measure
from meshrl.tools.diagnose.causes import Cost, costs
from meshrl.tools.diagnose.intervals import Intervals, total
from meshrl.tools.diagnose.read import Trace

OTHER = "other"  # bytes of a peak in no known part: activations, gathered parameters, Python and libraries


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The highest memory of a rank in a phase; parts: its bytes, and OTHER for the rest."""

    rank: int
    phase: str
    peak: int
    parts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """slow_down: time of a step with the profiler / time of a step without, of the same run. sync: the means of the
    weight sync's metrics, without the prefix sync/. ratio: computation / communication in the phase train, the mean
    over ranks. by_cause: the times of each rank; they are not in diagnose.json."""

    source: str
    steps: list[int]
    step_s: float
    slow_down: float | None
    ratio: float | None
    clock: str
    costs: list[Cost]
    phases: list[measure.PhaseTime]
    collectives: list[measure.Collective]
    stragglers: list[measure.Straggler]
    gaps: list[measure.Gap]
    memory: list[MemoryPeak]
    by_cause: dict[int, dict[str, Intervals]]
    sync: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def diagnose(trace: Trace) -> Diagnosis:
    of = {number: measure.lanes(rank) for number, rank in trace.ranks.items()}
    met = measure.meetings(trace)
    late, pauses = measure.stragglers(trace, met), measure.gaps(trace, of)
    names = [name for name in dict.fromkeys(p.name for p in trace.phases) if name not in BETWEEN_STEPS]
    windows = {name: trace.windows(name) for name in names} | {"step": trace.windows()}
    times = [
        measure.phase_time(number, name, inside, of[number], len(trace.steps))
        for name, inside in windows.items()
        if inside
        for number in trace.ranks
    ]
    ratios = [t.ratio for t in times if t.phase == "train" and t.ratio is not None]
    divided = measure.by_cause(trace, of, met)
    syncs = [step.sync for step in trace.steps if step.sync]
    return Diagnosis(
        source=str(trace.source),
        steps=[step.step for step in trace.steps],
        step_s=total(trace.windows()) / 1e9 / len(trace.steps),
        slow_down=_slow_down(trace),
        ratio=mean(ratios) if ratios else None,
        clock=trace.clock,
        costs=costs(trace, divided, late, pauses),
        phases=times,
        collectives=measure.collectives(trace, met),
        stragglers=late,
        gaps=pauses,
        memory=list(_memory(trace)),
        by_cause=divided,
        sync={key: mean(sync.get(key, 0.0) for sync in syncs) for key in (syncs[0] if syncs else ())},
        notes=trace.notes,
    )


def _slow_down(trace: Trace) -> float | None:
    """Steps without the profiler are compared, except the first one of a run, which is slower."""
    before = [step for step in trace.all_steps if not step.traced and step.step > 1]
    if not before or not all(step.traced for step in trace.steps):
        return None
    traced, untraced = (median(total(trace.windows("", [s])) for s in steps) for steps in (trace.steps, before))
    return traced / untraced if untraced else None


def _memory(trace: Trace) -> Iterator[MemoryPeak]:
    for number, rank in trace.ranks.items():
        for phase in dict.fromkeys(sample.phase for sample in rank.memory):
            samples = [sample for sample in rank.memory if sample.phase == phase]
            sample = max(samples, key=lambda one: _peak(one.parts))
            parts = {k: v for k, v in sample.parts.items() if k in ("params", "grads", "optimizer", "buffers")}
            rest = max(0, _peak(sample.parts) - sum(parts.values()))
            yield MemoryPeak(number, phase, _peak(sample.parts), {**parts, OTHER: rest})


def _peak(parts: Mapping[str, int]) -> int:
    return max((int(parts[k]) for k in ("peak_bytes", "peak_resident_bytes") if k in parts), default=0)


def as_record(found: Diagnosis) -> dict[str, Any]:
    """All numbers as plain JSON, in seconds and bytes."""
    record = asdict(found)
    del record["by_cause"]
    derived = {"collectives": ("gb_per_s",), "costs": ("title", "change"), "phases": ("ratio",)}
    for name, keys in derived.items():
        for row, one in zip(record[name], getattr(found, name)):
            row |= {key: getattr(one, key) for key in keys}
    return record


def write_perfetto(path: Path, trace: Trace) -> Path:
    """A Chrome trace for ui.perfetto.dev: one process for the controller and each rank, one thread for each kind of
    span, all on the controller's clock. Raises: OutputError."""
    events = list(_events(trace))
    start = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - start) / 1e3
    record = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock": trace.clock, "start_ns": start}}
    with output_errors(path, "Make room or give another folder by --out"), gzip.open(path, "wb", 5) as file:
        file.write(json.dumps(record).encode())
    return path


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    """ts in nanoseconds here."""
    steps = [(f"step {s.step}", s.start_ns, s.end_ns, {"traced": s.traced}) for s in trace.all_steps]
    phases = [(p.name, p.start_ns, p.end_ns, {"step": p.step}) for p in trace.phases]
    yield from _process(0, "controller", {"steps": steps, "phases": phases})
    for number, rank in trace.ranks.items():
        lanes: dict[str, list[Any]] = {}
        for s in rank.spans:
            lanes.setdefault({"phase": "commands"}.get(s.category, s.category), []).append(
                (s.name, s.start_ns, s.end_ns, dict(s.args))
            )
        if rank.profile is not None:
            convert = rank.facts.to_controller
            lanes["operations"] = [(name, convert(a), convert(b), {}) for a, b, name in rank.profile.operations]
        where = " ".join(text for text in (rank.facts.host, rank.facts.device) if text)
        yield from _process(number + 1, f"rank {number} ({where})", lanes)
        for sample in rank.memory:
            yield {"ph": "C", "pid": number + 1, "name": "memory", "ts": sample.at_ns, "args": dict(sample.parts)}


def _process(pid: int, name: str, lanes: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """A thread can't show events that overlap without one containing the other; those get a further thread."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for lane, (title, spans) in enumerate(lanes.items()):
        open_ends: list[list[int]] = []
        for text, start, end, facts in sorted(spans, key=lambda s: (s[1], -s[2])):
            for stack in open_ends:
                while stack and stack[-1] <= start:
                    stack.pop()
            slot = next((i for i, stack in enumerate(open_ends) if not stack or end <= stack[-1]), len(open_ends))
            tid = 100 * lane + slot
            if slot == len(open_ends):
                open_ends.append([])
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": title}}
            open_ends[slot].append(end)
            at = {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": (end - start) / 1e3}
            yield {**at, "name": text, "args": facts}
