"""Reads the traces of a run as one Trace on one clock. Times are unions of intervals: sorted lists of (start,
end) that neither touch nor overlap."""

from __future__ import annotations

import math
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshrl.config.values import scalar
from meshrl.core.errors import DataError, MeshrlError
from meshrl.core.files import Unreadable, is_there, open_plain
from meshrl.monitor.jsonl import data_errors, parse_large
from meshrl.monitor.recorder import (
    BETWEEN_STEPS,
    CONTROLLER,
    FOLDER,
    PROFILE_FILE,
    SPANS_FILE,
    Category,
    ControllerTrace,
    MemorySample,
    RankFacts,
    Span,
    Step,
    read_controller,
    read_rank,
)
from meshrl.tools.report.folder import read_settings
from meshrl.tools.state import read_part

Intervals = list[tuple[int, int]]


def union(*parts: Iterable[tuple[int, int]]) -> Intervals:
    """The times that are in at least one of these intervals, which may be in any order."""
    merged: Intervals = []
    for start, end in sorted(interval for part in parts for interval in part if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def overlap(a: Intervals, b: Intervals) -> Intervals:
    """The times that are in both unions."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def without(a: Intervals, b: Intervals) -> Intervals:
    """The times of union a that are not in union b."""
    if not a:
        return []
    edges = [a[0][0], *(edge for interval in b for edge in interval), max(a[-1][1], b[-1][1] if b else 0)]
    return overlap(a, union(zip(edges[::2], edges[1::2])))


def total(a: Intervals) -> int:
    """The length of a union."""
    return sum(end - start for start, end in a)


MAX_BYTES = 2 << 30  # of the JSON; a larger one would need more memory than it is worth
CONFIG = "config.yaml"
_COPIES = ("gpu_memcpy", "gpu_memset")
_CATEGORIES = ("cpu_op", "user_annotation", "kernel", *_COPIES)
_COMMUNICATION = re.compile(r"nccl|rccl|c10d::|gloo:|record_param_comms", re.IGNORECASE)
_DTYPE_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}
_Event = tuple[int, int, str, dict[str, Any]]  # start and end in nanoseconds, name, and the event itself


Operation = tuple[int, int, str]
"""Start and end in nanoseconds, and name, of a kernel, or on a CPU of an operator of torch."""


@dataclass(frozen=True, slots=True)
class Profile:
    """All times are of the rank's clock. operations: computation, in the order of their starts. spans: collectives and
    copies."""

    operations: list[Operation]
    spans: list[Span]

    def around(self, time_ns: int) -> str:
        """The operations before and after a time, for a text."""
        at = bisect_left(self.operations, time_ns, key=lambda operation: operation[0])
        before = self.operations[at - 1][2] if at else "the start"
        after = self.operations[at][2] if at < len(self.operations) else "the end"
        return f"between {before:.60} and {after:.60}"


def read_profile(path: Path) -> Profile:
    """Read a trace, compressed or not."""
    try:
        with open_plain(path) as file:
            data = file.read(MAX_BYTES + 1)
        if data.startswith(b"\x1f\x8b"):
            data = zlib.decompressobj(wbits=31).decompress(data, MAX_BYTES + 1)
    except (OSError, Unreadable, zlib.error) as cause:
        raise DataError(f"{path}: not a trace of torch.profiler: {cause}") from cause
    if len(data) > MAX_BYTES:
        raise DataError(f"{path}: more than {MAX_BYTES:,} bytes of JSON; record fewer steps")
    try:
        record = parse_large(data)
    except ValueError as cause:
        raise DataError(f"{path}: not a trace of torch.profiler: {cause}") from cause
    if not isinstance(record, dict) or not isinstance(record.get("traceEvents"), list):
        raise DataError(f"{path}: not a trace of torch.profiler: it has no list traceEvents")
    with data_errors(str(path), "a trace of torch.profiler"):
        return _profile(record)


def _profile(record: dict[str, Any]) -> Profile:
    base = int(record.get("baseTimeNanoseconds") or 0)
    by_category: dict[str, list[_Event]] = {category: [] for category in _CATEGORIES}
    for event in record["traceEvents"]:
        if event.get("cat") in by_category and event.get("ph") == "X":
            start = base + round(float(event["ts"]) * 1000)
            by_category[event["cat"]].append((start, start + round(event["dur"] * 1000), str(event["name"]), event))
    copies = [_span("copy", *event) for category in _COPIES for event in by_category[category]]
    kernels, operators = by_category["kernel"], by_category["cpu_op"]
    on_device = bool(kernels or copies)
    operations, spans = [], copies
    if not on_device:
        # The operators that compute: those with a namespace, such as aten::mm. Nodes of autograd have none; they
        # contain operators, and may wait for a collective.
        ordered = sorted(operators, key=lambda event: (str(event[3].get("tid")), event[0], -event[1]))
        for op, after in zip(ordered, [*ordered[1:], None]):
            is_outer = after is not None and after[3].get("tid") == op[3].get("tid") and after[0] < op[1]
            if not is_outer or ("::" in op[2] and not op[2].startswith("autograd::")):
                kernels.append(op)
    for start, end, name, event in kernels:
        if _COMMUNICATION.search(name):
            spans.append(_span("collective", start, end, name, event))
        else:
            operations.append((start, end, name))
    return Profile(sorted(operations), spans)


def _span(category: Category, start: int, end: int, name: str, event: dict[str, Any]) -> Span:
    """A collective with its bytes, which NCCL's kernels state as numbers of elements, or a copy."""
    args = event.get("args") or {}
    label = str(args.get("Collective name") or name)
    if "Out msg nelems" in args:
        elements = max(int(args["Out msg nelems"]), int(args.get("In msg nelems", 0)))
        size = elements * _DTYPE_BYTES.get(str(args.get("dtype")), 1)
        return Span(label, category, start, end, {"bytes": size, "group": int(args.get("Group size", 0))})
    return Span(label, category, start, end, {"bytes": int(args["bytes"])} if "bytes" in args else {})


@dataclass(kw_only=True, slots=True)
class Rank:
    """One rank on the controller's clock, except for its profile. operations: the times of the profile's operations;
    None if the profiler did not record this rank."""

    facts: RankFacts
    spans: list[Span]
    memory: list[MemorySample] = field(default_factory=list)
    profile: Profile | None = None
    operations: Intervals | None = None

    def of(self, category: str, names: Sequence[str] = ()) -> Intervals:
        """The times of the spans of a category, or of those with one of these names."""
        chosen = (s for s in self.spans if s.category == category and (not names or s.name in names))
        return union((s.start_ns, s.end_ns) for s in chosen)


@dataclass(kw_only=True, slots=True)
class Trace:
    """steps: those of control.steps that are examined. clock: how the clocks of the ranks were aligned. clock_error_ns:
    of a difference between two ranks' times; infinite for machines whose clocks were not compared. config: values by
    key, {} = unknown. notes: what is missing, and why."""

    source: Path
    control: ControllerTrace
    steps: Sequence[Step]
    ranks: dict[int, Rank]
    clock: str
    clock_error_ns: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def windows(self, name: str = "", steps: Sequence[Step] | None = None) -> Intervals:
        """The time of a phase in these steps, or all time of the steps without what is between them."""
        inside = union((s.start_ns, s.end_ns) for s in (self.steps if steps is None else steps))
        between = union((p.start_ns, p.end_ns) for p in self.control.phases if p.name in BETWEEN_STEPS)
        if not name:
            return without(inside, between)
        return overlap(inside, union((p.start_ns, p.end_ns) for p in self.control.phases if p.name == name))

    @property
    def named_share(self) -> float:
        """The share of the steps' time, from the oldest phase in the trace on, in which at least one phase runs."""
        phases = union((p.start_ns, p.end_ns) for p in self.control.phases)
        inside = without(self.windows(), [(0, phases[0][0])] if phases else [])
        return total(overlap(inside, phases)) / max(1, total(inside))

    def work(self) -> dict[str, Intervals]:
        """The time of each phase in the steps, without what is between them."""
        names = dict.fromkeys(p.name for p in self.control.phases if p.name not in BETWEEN_STEPS)
        return {name: self.windows(name) for name in names}


def read_trace(path: Path) -> Trace:
    """Read the traces of a run's folder. A file of them stands for all. Raises: DataError that names a damaged one."""
    if path.is_file() and is_there(path.with_name(CONTROLLER)):
        path = path.parent
    for folder in (path / FOLDER, path):
        if is_there(folder / CONTROLLER):
            return _run_trace(folder)
    if is_there(path / "metrics.jsonl"):
        raise MeshrlError(
            f"{path} is a run without traces: no step has ended, or an older version wrote it. Give its config instead "
            "to profile some steps of it, or train with monitor.trace_steps=4"
        )
    raise MeshrlError(
        f"{path} has no traces of a run. Give a config, to profile some steps of it, or the folder of a run that has "
        "traces/"
    )


def _run_trace(folder: Path) -> Trace:
    """The ranks on one clock."""
    control, ranks, notes = read_controller(folder / CONTROLLER), dict[int, Rank](), list[str]()
    for number, facts in sorted(control.ranks.items()):
        of_rank = read_rank(folder / SPANS_FILE.format(number))
        rank = Rank(facts=facts, spans=list(of_rank.spans), memory=list(of_rank.memory))
        if of_rank.num_dropped:
            notes.append(f"rank {number}: its {of_rank.num_dropped:,} oldest spans were not saved")
        if is_there(path := folder / PROFILE_FILE.format(number)):
            profile, has_collectives = read_profile(path), any(s.category == "collective" for s in rank.spans)
            rank.profile = profile if profile.operations or profile.spans else None
            on_device = facts.device != "cpu"  # on a CPU the profiler sees the launch of a collective only
            rank.spans += [s for s in profile.spans if s.category == "copy" or (on_device and not has_collectives)]
        if rank.spans:
            ranks[number] = rank
        else:
            notes.append(f"rank {number} is left out: nothing is known about its time")
    if not ranks or not control.steps:
        raise MeshrlError(f"{folder} has no step of a rank; train with more steps")
    config = dict[str, Any]()
    for path in (at / CONFIG for at in (folder, folder.parent) if is_there(at / CONFIG)):
        settings = read_part(notes, read_settings, path) or []
        config = {setting.key: scalar(setting.value.strip('"')) for setting in settings}
    prompts, samples = (config.get(f"loop.{key}", math.inf) for key in ("prompts_per_step", "samples_per_prompt"))
    if prompts * samples <= config.get("rollout.max_running_requests", 0):
        config["rollout.max_running_requests"] = "all"
    if config and all(rank.facts.device == "cpu" for rank in ranks.values()):
        config["model.dtype"] = "bfloat16"  # there the default is the faster one
    for rank in ranks.values():
        convert = rank.facts.to_controller
        rank.spans = [replace(s, start_ns=convert(s.start_ns), end_ns=convert(s.end_ns)) for s in rank.spans]
        rank.memory = [replace(m, at_ns=convert(m.at_ns)) for m in rank.memory]
        if rank.profile is not None:
            merged = union((start, end) for start, end, _ in rank.profile.operations)
            rank.operations = [(convert(start), convert(end)) for start, end in merged]
    is_profiled = any(rank.profile for rank in ranks.values())
    traced = [s for s in control.steps if s.traced] if is_profiled else []
    if not traced:
        notes.append(
            "without a profile, all of a forward and backward pass outside collectives counts as computation: Python's "
            "time and overlap are not visible; monitor.trace_steps=4 records profiles"
        )
    clock = "clocks of ranks not compared: those of their machines are used"
    clock_error_ns = math.inf if len({rank.facts.host for rank in ranks.values()}) > 1 else 0.0
    if errors := [reading.error_ns for rank in ranks.values() for reading in rank.facts.clock]:
        error, clock_error_ns = f"error at most {max(errors) / 1e6:.3f} ms", 2.0 * max(errors)
        clock = f"clocks of ranks aligned by messages between controller and ranks, {error}"
    return Trace(
        source=folder,
        control=control,
        steps=traced or control.steps,
        ranks=ranks,
        clock=clock,
        clock_error_ns=clock_error_ns,
        config=config,
        notes=notes,
    )
