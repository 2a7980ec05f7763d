"""Diagnosis: all numbers of a trace, what costs time and what to change, and the files that hold them."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from meshrl.config.values import scalar
from meshrl.core.errors import MeshrlError
from meshrl.tools.diagnose import measure
from meshrl.tools.diagnose.read import Intervals, Trace, overlap, total
from meshrl.tools.page.charts import number
from meshrl.tools.page.document import package_text

CAUSES: dict[str, dict[str, str]] = json.loads(package_text("meshrl.tools.diagnose", "causes.json"))
"""By cause: its title, and what to change in each program: train and sft are commands of meshrl. The only place of
these texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """seconds: of a step, the mean over ranks. share: of the step. detail: what was measured about it. change: what to
    change in the program that made the trace. A slow rank or a slow link of one has its number in rank."""

    cause: str
    title: str
    seconds: float
    share: float
    change: str
    detail: str = ""
    rank: int | None = None


def costs(
    trace: Trace, times: dict[int, dict[str, Intervals]], late: Sequence[measure.Straggler], details: dict[str, str]
) -> list[Cost]:
    """All costs, the largest first. They add up to the time of a step.

    Of a named straggler, its own longer time and the time in which the others wait for it are one cost: that of a slow
    link if its collectives take longer than those of the others, else that of a slow rank.
    """
    scale = 1e9 * len(trace.steps) * len(trace.ranks)
    wall = total(trace.windows()) / 1e9 / len(trace.steps)
    program = str(trace.control.facts.get("kind"))

    def cost(cause: str, took: float, detail: str, rank: int | None = None) -> Cost:
        texts = CAUSES[cause]
        title, change = texts["title"], open_parts(texts.get(program) or texts["train"], trace.config)
        if rank is not None:
            title = f"{'a slow rank' if cause == 'slow_rank' else 'a slow link'}: the others wait for rank {rank}"
        share = took / wall
        return Cost(cause=cause, title=title, seconds=took, share=share, change=change, detail=detail, rank=rank)

    seconds = {c: sum(total(rank[c]) for rank in times.values() if c in rank) / scale for c in CAUSES}
    blamed = []
    for straggler in late:
        late_rank, phase = straggler.rank, straggler.phase
        trains = trace.ranks[late_rank].facts.trains
        others = [times[n] for n, rank in trace.ranks.items() if n != late_rank and rank.facts.trains == trains]
        if not straggler.is_named or not others:
            continue
        extra = {
            cause: total(times[late_rank][cause]) - median(total(rank[cause]) for rank in others)
            for cause in (("sampling",) if phase == "rollout" else ("compute", "communication", "copy", "host"))
        }
        kind = max(extra, key=lambda cause: extra[cause])
        waiting = "imbalance" if phase == "rollout" else "wait"
        longer = {kind: max(0.0, extra[kind]) / scale, waiting: straggler.late_s * len(others) / len(trace.ranks)}
        moved = {cause: min(part, seconds[cause]) for cause, part in longer.items()}
        for cause, part in moved.items():
            seconds[cause] -= part
        detail = f"in phase {phase} it arrives {number(straggler.late_s, 's')} later than the others in a step"
        detail += f"; most of it is {CAUSES[kind]['of_rank']}"
        cause = "communication" if kind == "communication" else "slow_rank"
        blamed.append(cost(cause, sum(moved.values()), detail, late_rank))
    if not any(straggler.is_named and straggler.phase != "rollout" for straggler in late):
        is_unknown, none = math.isinf(trace.clock_error_ns), "no rank is the late one in nearly all steps"
        details = {**details, "wait": "the machines' clocks were not compared" if is_unknown else none}
    divided = [cost(cause, took, details.get(cause, "")) for cause, took in seconds.items() if took > 0]
    return sorted([*divided, *blamed], key=lambda each: -each.seconds)


_KEY = r"([a-z_]+(?:\.[a-z_]+)+)"
_AS_FAST = {"SHARD_GRAD_OP": "NO_SHARD", "bfloat16": "float16"}  # another value that needs no advice


def open_parts(text: str, config: Mapping[str, Any]) -> str:
    """The parts of an advice, divided by semicolons, that a config ({} = unknown) does not follow yet. It follows
    KEY=VALUE when this is set, and "raise", "lower" and "fewer KEY" at the end of the key's range. A part with
    (KEY: VALUE) is for configs with this value."""
    parts = [part for part in text.split("; ") if not (config and _is_followed(part, config))]
    joined = "; ".join(re.sub(rf" \({_KEY}: \w+\)", "", part) if config else part for part in parts)
    return joined if "." in joined.split()[0] else joined[0].upper() + joined[1:]  # a key begins it


def _is_followed(part: str, config: Mapping[str, Any]) -> bool:
    advised, needed = (re.findall(pattern, part) for pattern in (rf"{_KEY}=(\w+)", rf"\({_KEY}: (\w+)\)"))
    has = [config.get(key) in (scalar(value), _AS_FAST.get(value, "")) for key, value in advised]
    for verb, key in re.findall(rf"([Rr]aise|[Ll]ower|fewer) {_KEY}", part):
        ends = {"lower": (0, 1), "fewer": ("[]",)}.get(verb.lower(), (0, None) if "_every_steps" in key else ("all",))
        has.append(key in config and config[key] in ends)
    return (bool(has) and all(has)) or any(config.get(key) != value for key, value in needed)


SYNC_STAGES = ("cast", "load", "verify", "wait")  # of the metrics sync/<stage>_s


def details(trace: Trace, gaps: Sequence[measure.Gap], sync: Mapping[str, float]) -> dict[str, str]:
    """What was measured about some of the causes."""
    texts = {}
    if sync:
        took, longest = max((sync.get(f"{stage}_s", 0.0), stage) for stage in SYNC_STAGES)
        size = number(sync.get("num_bytes", 0.0), "bytes")
        texts["sync"] = f"{size}; longest stage: {longest} {number(took, 's')}"
        inside = trace.windows("sync")
        copies = [
            (total(overlap(inside, rank.of("copy", (name,)))), name, index)
            for index, rank in trace.ranks.items()
            for name in {span.name for span in rank.spans if span.category == "copy"}
        ]
        if copies:
            took, name, index = max(copies)
            texts["sync"] += f"; longest copies: {name} {number(took / 1e9 / len(trace.steps), 's')} in rank {index}"
    if gaps:
        of_all = sum(gap.end_ns - gap.start_ns for gap in gaps) / 1e9 / len(trace.steps) / len(trace.ranks)
        first = gaps[0]
        longest_s = (first.end_ns - first.start_ns) / 1e9
        texts["host"] = f"{number(of_all, 's')} of it in gaps above 1 ms"
        texts["host"] += f"; the longest is {number(longest_s, 's')} in rank {first.rank}, {first.where}"
    return texts


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
    over ranks."""

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
    # Steps without the profiler are compared, except the first one of a run, which is slower.
    slow_down, before = None, [step for step in trace.control.steps if not step.traced and step.step > 1]
    if before and all(step.traced for step in trace.steps):
        traced, untraced = (median(total(trace.windows("", [s])) for s in steps) for steps in (trace.steps, before))
        slow_down = traced / untraced if untraced else None
    syncs = [step.sync for step in trace.steps if step.sync]
    sync = {key: mean(sync.get(key, 0.0) for sync in syncs) for key in (syncs[0] if syncs else ())}
    return Diagnosis(
        trace=trace,
        step_s=step_s,
        slow_down=slow_down,
        ratio=mean(ratios) if ratios else None,
        costs=costs(trace, measure.by_cause(trace, of, met), late, details(trace, pauses, sync)),
        phases=times,
        collectives=measure.collectives(trace, met),
        stragglers=late,
        gaps=pauses,
        memory=list(_memory(trace)),
        sync=sync,
    )


def _memory(trace: Trace) -> Iterator[MemoryPeak]:
    for index, rank in trace.ranks.items():
        highest: dict[str, tuple[int, Mapping[str, int]]] = {}
        for sample in rank.memory:
            peak = sample.parts.get("peak_bytes", sample.parts.get("peak_resident_bytes", 0))
            if sample.phase not in highest or peak > highest[sample.phase][0]:
                highest[sample.phase] = peak, sample.parts
        for phase, (peak, parts) in highest.items():
            model_parts = {k: v for k, v in parts.items() if k in ("params", "grads", "optimizer", "buffers")}
            yield MemoryPeak(index, phase, peak, {**model_parts, OTHER: max(0, peak - sum(model_parts.values()))})


def as_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """All numbers as plain JSON, in seconds and bytes."""
    tables = ("costs", "phases", "collectives", "stragglers", "gaps", "memory")
    return {
        "source": str(diagnosis.trace.source),
        "steps": [step.step for step in diagnosis.trace.steps],
        "clock": diagnosis.trace.clock,
        "named_share": diagnosis.trace.named_share,
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
    steps = [(f"step {s.step}", s.start_ns, s.end_ns, {"traced": s.traced}) for s in trace.control.steps]
    phases: list[Any] = [(p.name, p.start_ns, p.end_ns, {}) for p in trace.control.phases]
    yield from _process(0, "controller", {"steps": steps, "phases": phases})
    for index, rank in trace.ranks.items():
        lanes: dict[str, list[Any]] = {}
        for s in rank.spans:
            lanes.setdefault({"phase": "commands"}.get(s.category, s.category), []).append(
                (s.name, s.start_ns, s.end_ns, dict(s.args))
            )
        if rank.profile is not None:
            convert = rank.facts.to_controller
            lanes["operations"] = [(name, convert(a), convert(b), {}) for a, b, name in rank.profile.operations]
        place = f"{rank.facts.host} {rank.facts.device}".strip()
        yield from _process(index + 1, f"rank {index} ({place})", lanes)
        for sample in rank.memory:
            yield {"ph": "C", "pid": index + 1, "name": "memory", "ts": sample.at_ns, "args": dict(sample.parts)}


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
