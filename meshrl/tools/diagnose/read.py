"""Reads the traces of a run, or of another program, as one Trace on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshrl.core.errors import DataError, MeshrlError
from meshrl.core.files import is_there
from meshrl.monitor.trace import (
    BETWEEN_STEPS,
    CONTROLLER,
    FOLDER,
    PROFILE_FILE,
    SPANS_FILE,
    ControllerTrace,
    MemorySample,
    Phase,
    RankFacts,
    Span,
    Step,
    read_controller,
    read_rank,
)
from meshrl.tools.diagnose.intervals import Intervals, overlap, union, without
from meshrl.tools.diagnose.profile import Profile, read_profile


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
    """steps: those to be examined. all_steps: also those without a profile. clock: how the clocks of the ranks were
    aligned, and the error. notes: what is missing, and why."""

    source: Path
    steps: list[Step]
    all_steps: list[Step]
    phases: list[Phase]
    ranks: dict[int, Rank]
    clock: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def windows(self, name: str = "", steps: Sequence[Step] | None = None) -> Intervals:
        """The time of a phase in these steps, or all time of the steps, without what is between them."""
        inside = union((s.start_ns, s.end_ns) for s in (self.steps if steps is None else steps))
        between = union((p.start_ns, p.end_ns) for p in self.phases if p.name in BETWEEN_STEPS)
        if not name:
            return without(inside, between)
        return overlap(inside, union((p.start_ns, p.end_ns) for p in self.phases if p.name == name))


def read_trace(path: Path) -> Trace:
    """Read the traces of a run's folder, or a file or a folder of torch.profiler's traces.

    Raises: MeshrlError when there is none.
    """
    for folder in (path / FOLDER, path):
        if is_there(folder / CONTROLLER) or _numbered(folder, SPANS_FILE):
            return _of_run(folder)
    if is_there(path / "metrics.jsonl"):
        raise MeshrlError(
            f"{path} is a run without traces: no step has ended, or an older version wrote it. Give its config instead "
            "to profile some steps of it, or train with monitor.trace_steps=3"
        )
    files = sorted(f for end in ("*.json", "*.json.gz") for f in path.glob(end)) if path.is_dir() else [path]
    return _of_other_program(path, files)


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """The files of ranks in a folder, by rank."""
    start, end = pattern.split("{:05d}")
    found = ((path, path.name[len(start) : -len(end)]) for path in folder.glob(f"{start}*{end}"))
    return {int(number): path for path, number in sorted(found) if number.isdecimal()}


def _of_run(folder: Path) -> Trace:
    notes: list[str] = []
    control = ControllerTrace(phases=[], steps=[], ranks={})
    try:
        control = read_controller(folder / CONTROLLER)
    except DataError as cause:
        notes.append(f"no steps, no phases of the controller, and clocks of ranks that are not aligned: {cause}")
    ranks: dict[int, Rank] = {}
    files, profiles = _numbered(folder, SPANS_FILE), _numbered(folder, PROFILE_FILE)
    for number in sorted({*control.ranks, *files, *profiles}):
        facts = control.ranks.get(number) or RankFacts(host="", device="cpu", trains=True, samples=False)
        rank = Rank(facts=facts, spans=[])
        try:
            of_rank = read_rank(files.get(number, folder / SPANS_FILE.format(number)))
            rank.spans, rank.memory = list(of_rank.spans), list(of_rank.memory)
            if of_rank.num_dropped:
                notes.append(f"rank {number}: its {of_rank.num_dropped:,} oldest spans were not saved")
        except DataError as cause:
            notes.append(f"rank {number} has no spans: {cause}")
        if number in profiles:
            _add_profile(rank, number, profiles[number], notes)
        if rank.spans or rank.profile is not None:
            ranks[number] = _on_controllers_clock(rank)
    if not ranks:
        raise MeshrlError(f"{folder}: no file of a rank can be read. " + "; ".join(notes))
    phases = list(control.phases) or _phases_of(ranks)
    steps = list(control.steps) or [Step(1, min(p.start_ns for p in phases), max(p.end_ns for p in phases))]
    traced = [s for s in steps if s.traced] if any(rank.profile for rank in ranks.values()) else []
    if not traced:
        notes.append(
            "without a profile, all of a forward and backward pass outside collectives counts as computation: Python's "
            "time and overlap are not visible; monitor.trace_steps=3 records profiles"
        )
    errors = [reading.error_ns for rank in ranks.values() for reading in rank.facts.clock]
    clock = (
        f"clocks of ranks aligned by messages between controller and ranks, error at most {max(errors) / 1e6:.3f} ms"
        if errors
        else "clocks of ranks not compared: those of their machines are used"
    )
    return Trace(
        source=folder,
        steps=traced or steps,
        all_steps=steps,
        phases=phases,
        ranks=ranks,
        clock=clock,
        facts=dict(control.facts),
        notes=notes,
    )


def _phases_of(ranks: dict[int, Rank]) -> list[Phase]:
    """The commands of the ranks in place of the controller's phases."""
    spans = [s for rank in ranks.values() for s in rank.spans]
    named = [s for s in spans if s.category == "phase"] or [replace(s, name="step") for s in spans]
    return [Phase(s.name, s.start_ns, s.end_ns, 1) for s in named]


def _add_profile(rank: Rank, number: int, path: Path, notes: list[str]) -> None:
    try:
        rank.profile = read_profile(path)
    except DataError as cause:
        notes.append(f"rank {number} has no profile: {cause}")
        return
    if rank.profile.is_cut:
        notes.append(f"rank {number}: the end of {path.name} is missing; what is before it is used")
    has_collectives = any(s.category == "collective" for s in rank.spans)
    on_device = rank.facts.device != "cpu"  # on a CPU the profiler sees the launch of a collective only
    rank.spans += [s for s in rank.profile.spans if s.category == "copy" or (on_device and not has_collectives)]


def _on_controllers_clock(rank: Rank) -> Rank:
    convert = rank.facts.to_controller
    rank.spans = [replace(s, start_ns=convert(s.start_ns), end_ns=convert(s.end_ns)) for s in rank.spans]
    rank.memory = [replace(m, at_ns=convert(m.at_ns)) for m in rank.memory]
    if rank.profile is not None:
        merged = union((start, end) for start, end, _ in rank.profile.operations)
        rank.operations = [(convert(start), convert(end)) for start, end in merged]
    return rank


def _of_other_program(path: Path, files: Sequence[Path]) -> Trace:
    """A trace of torch.profiler: each step is one phase, in which the rank has one command."""
    ranks: dict[int, Rank] = {}
    notes = ["a trace of another program: it has no phases, syncs and memory; its steps are those of ProfilerStep"]
    for file in files:
        try:
            profile = read_profile(file)
        except DataError as cause:
            notes.append(str(cause))
            continue
        if profile.is_cut:
            notes.append(f"the end of {file.name} is missing; what is before it is used")
        times = [(start, end) for start, end, _ in profile.operations] + [(s.start_ns, s.end_ns) for s in profile.spans]
        if not times:
            notes.append(f"{file}: it has no operation of a device")
            continue
        start, end = min(t[0] for t in times), max(t[1] for t in times)
        commands = [Span("train", "phase", a, b) for _, a, b in profile.steps] or [Span("train", "phase", start, end)]
        number = profile.rank if profile.rank is not None and profile.rank not in ranks else len(ranks)
        facts = RankFacts(host=profile.host, device=profile.device, trains=True, samples=False)
        ranks[number] = _on_controllers_clock(Rank(facts=facts, spans=[*commands, *profile.spans], profile=profile))
    if not ranks:
        raise MeshrlError(
            f"{path} is neither the folder of a run, such as runs/NAME, nor a trace of torch.profiler. "
            + "; ".join(notes[1:4])
        )
    first = ranks[min(ranks)]
    named = first.profile.steps if first.profile is not None else []
    commands = [s for s in first.spans if s.category == "phase"]
    steps = [Step(n, s.start_ns, s.end_ns, True) for n, s in zip([n for n, *_ in named] or [1], commands)]
    phases = [Phase("train", s.start_ns, s.end_ns, s.step) for s in steps]
    clock = "clocks of ranks not compared: those of their machines are used"
    return Trace(source=path, steps=steps, all_steps=steps, phases=phases, ranks=ranks, clock=clock, notes=notes)
