"""Diagnosis: all numbers of a trace, and the files that hold them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from meshrl.core.errors import MeshrlError
from meshrl.tools.diagnose import measure
from meshrl.tools.diagnose.causes import Cost, costs, details
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

    trace: Trace
    step_s: float
    slow_down: float | None
    ratio: float | None
    costs: list[Cost]
    phases: list[measure.PhaseTime]
    collectives: list[measure.Collective]
    stragglers: list[measure.Straggler]
    gaps: list[measure.Gap]
    memory: list[MemoryPeak]
    by_cause: dict[int, dict[str, Intervals]]
    sync: dict[str, float]


def diagnose(trace: Trace) -> Diagnosis:
    """Raises: MeshrlError when the steps of the trace take no time."""
    step_s = total(trace.windows()) / 1e9 / len(trace.steps)
    if not step_s:
        raise MeshrlError(f"{trace.source}: its steps have a length of 0 s: the trace is damaged, record another one")
    of = {number: measure.lanes(rank) for number, rank in trace.ranks.items()}
    met = measure.meetings(trace)
    late, pauses = measure.stragglers(trace, met), measure.gaps(trace, of)
    times = [
        measure.phase_time(number, name, inside, of[number], len(trace.steps))
        for name, inside in [*trace.work().items(), ("step", trace.windows())]
        if inside
        for number in trace.ranks
    ]
    ratios = [t.ratio for t in times if t.phase == "train" and t.ratio is not None]
    divided = measure.by_cause(trace, of, met)
    syncs = [step.sync for step in trace.steps if step.sync]
    sync = {key: mean(sync.get(key, 0.0) for sync in syncs) for key in (syncs[0] if syncs else ())}
    return Diagnosis(
        trace=trace,
        step_s=step_s,
        slow_down=_slow_down(trace),
        ratio=mean(ratios) if ratios else None,
        costs=costs(trace, divided, late, details(trace, pauses, sync)),
        phases=times,
        collectives=measure.collectives(trace, met),
        stragglers=late,
        gaps=pauses,
        memory=list(_memory(trace)),
        by_cause=divided,
        sync=sync,
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
        highest: dict[str, tuple[int, Mapping[str, int]]] = {}
        for sample in rank.memory:
            peak = max(sample.parts.get(kind, 0) for kind in ("peak_bytes", "peak_resident_bytes"))
            if sample.phase not in highest or peak > highest[sample.phase][0]:
                highest[sample.phase] = peak, sample.parts
        for phase, (peak, parts) in highest.items():
            model_parts = {k: v for k, v in parts.items() if k in ("params", "grads", "optimizer", "buffers")}
            yield MemoryPeak(number, phase, peak, {**model_parts, OTHER: max(0, peak - sum(model_parts.values()))})


def as_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """All numbers as plain JSON, in seconds and bytes."""
    tables = ("costs", "phases", "collectives", "stragglers", "gaps", "memory")
    return {
        "source": str(diagnosis.trace.source),
        "steps": [step.step for step in diagnosis.trace.steps],
        "clock": diagnosis.trace.clock,
        "notes": diagnosis.trace.notes,
        **{name: getattr(diagnosis, name) for name in ("step_s", "slow_down", "ratio", "sync")},
        **{name: [asdict(row) for row in getattr(diagnosis, name)] for name in tables},
    }


def perfetto(trace: Trace) -> bytes:
    """A compressed Chrome trace for ui.perfetto.dev: one process for the controller and each rank, one thread for each
    kind of span, all on the controller's clock."""
    events = list(_events(trace))
    start = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - start) / 1e3
    record = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock": trace.clock, "start_ns": start}}
    return gzip.compress(json.dumps(record).encode(), 5)


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    """ts in nanoseconds here."""
    steps = [(f"step {s.step}", s.start_ns, s.end_ns, {"traced": s.traced}) for s in trace.all_steps]
    phases: list[Any] = [(p.name, p.start_ns, p.end_ns, {}) for p in trace.phases]
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
        place = f"{rank.facts.host} {rank.facts.device}".strip()
        yield from _process(number + 1, f"rank {number} ({place})", lanes)
        for sample in rank.memory:
            yield {"ph": "C", "pid": number + 1, "name": "memory", "ts": sample.at_ns, "args": dict(sample.parts)}


def _process(pid: int, name: str, lanes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """A thread can't show events that overlap without one containing the other; those get a further thread."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for lane, (title, spans) in enumerate(lanes.items()):
        open_ends: list[list[int]] = []
        for text, start, end, args in sorted(spans, key=lambda s: (s[1], -s[2])):
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
            yield {**at, "name": text, "args": args}
