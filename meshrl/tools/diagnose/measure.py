"""Where the ranks' time goes: by kind in each phase, by cause over all steps, in each collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from meshrl.monitor.recorder import Span
from meshrl.tools.diagnose.read import Intervals, Rank, Trace, overlap, total, union, without

TRAIN_COMMANDS = ("annotate", "train", "optim")
SAMPLING = ("rollout", "eval")
STRAGGLER_SHARE = 0.1  # of the phase's time: below this, ranks are late by chance
MIN_STEPS = 4  # in fewer steps, one of several healthy ranks may be the late one by chance


@dataclass(frozen=True, slots=True)
class Lanes:
    """A rank's times by kind. command: it executes a command of the controller."""

    compute: Intervals
    sampling: Intervals
    collective: Intervals
    copy: Intervals
    command: Intervals


def lanes(rank: Rank) -> Lanes:
    """Computation is the profiler's operations. Without a profile it is the forward and backward passes without their
    collectives, because FSDP2 on gloo waits for each collective."""
    collective, sampling = rank.of("collective"), rank.of("phase", SAMPLING)
    compute = without(rank.of("compute"), collective) if rank.operations is None else rank.operations
    return Lanes(compute, sampling, collective, rank.of("copy"), rank.of("phase"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """Seconds of one rank in one phase of a step, the mean. wall = compute + exposed + copy + host + idle.

    compute: computation or sampling; overlapped is the part of it in which a collective also runs. exposed: collectives
    without computation. host: in a command, without any of these. idle: between commands. ratio: computation /
    communication, as perf/compute_comm_ratio; None without communication.
    """

    rank: int
    phase: str
    wall: float
    compute: float
    exposed: float
    overlapped: float
    copy: float
    host: float
    idle: float
    ratio: float | None


def phase_time(rank: int, phase: str, windows: Intervals, of: Lanes, num_steps: int = 1) -> PhaseTime:
    """Divide the time of a phase by kind."""
    compute = union(of.compute, of.sampling)
    kinds = {"compute": compute, "exposed": of.collective, "copy": of.copy, "host": of.command}
    times = divide(windows, kinds, "idle")
    times |= {"wall": windows, "overlapped": overlap(overlap(windows, compute), of.collective)}
    seconds = {kind: total(time) / 1e9 / num_steps for kind, time in times.items()}
    communication = seconds["exposed"] + seconds["overlapped"]
    ratio = (seconds["wall"] - seconds["exposed"]) / communication if communication else None
    return PhaseTime(rank=rank, phase=phase, ratio=ratio, **seconds)


def divide(time: Intervals, parts: Mapping[str, Intervals], rest: str) -> dict[str, Intervals]:
    """Each moment of `time` belongs to the first part that contains it, or else to `rest`."""
    times = {}
    for name, part in parts.items():
        times[name] = overlap(time, part)
        time = without(time, part)
    return times | {rest: time}


@dataclass(frozen=True, slots=True)
class Meeting:
    """The same collective in all ranks of its group, by rank. Its data moves after the last rank has arrived."""

    name: str
    phase: str
    step: int
    spans: dict[int, Span]

    @property
    def last_ns(self) -> int:
        return max(span.start_ns for span in self.spans.values())


def meetings(trace: Trace) -> list[Meeting]:
    """The n-th collective of a name in a step is the same one in all ranks of a group. A step in which their numbers
    differ is left out. If all ranks sample in turn with training, they also meet at the end of the rollout."""
    met = []
    windows = trace.work()
    for step in trace.steps:
        groups: dict[tuple[str, int, int], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
        for number, rank in trace.ranks.items():
            for span in rank.spans:
                if span.category == "collective" and step.start_ns <= span.start_ns < step.end_ns:
                    size = int(span.args.get("group") or len(trace.ranks))
                    # Shards are in adjacent ranks, copies of the model in ranks with equal distances.
                    is_of_copies = "all_reduce" in span.name and size < len(trace.ranks)
                    group = number % (len(trace.ranks) // size) if is_of_copies else number // max(1, size)
                    groups[span.name, size, group][number].append(span)
        for (name, _, _), by_rank in groups.items():
            if len({len(spans) for spans in by_rank.values()}) == 1:
                for column in zip(*(sorted(spans, key=lambda s: s.start_ns) for spans in by_rank.values())):
                    at = [(column[0].start_ns, column[0].start_ns + 1)]
                    phase = next((n for n, times in windows.items() if overlap(times, at)), "")
                    if column[0].args.get("phase") in TRAIN_COMMANDS and "train" in windows:
                        phase = "train"  # the next rollout may overlap with it
                    if phase:
                        met.append(Meeting(name, phase, step.step, dict(zip(by_rank, column))))
        if trace.control.facts.get("schedule") == "colocated" and len(trace.ranks) > 1:
            inside = overlap(windows.get("rollout", []), [(step.start_ns, step.end_ns)])
            ends = {n: overlap(inside, rank.of("phase", SAMPLING)) for n, rank in trace.ranks.items()}
            if inside and all(ends.values()):
                spans = {n: Span("end of the answers", "host", e[-1][1], inside[-1][1]) for n, e in ends.items()}
                met.append(Meeting("end of the answers", "rollout", step.step, spans))
    return met


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """num, bytes and seconds are of a rank in a step, the mean; wait_s is the part of seconds before the last rank
    arrived. gb_per_s is of the rest; None without bytes or time."""

    name: str
    num: float
    bytes: float
    seconds: float
    wait_s: float
    gb_per_s: float | None


def collectives(trace: Trace, met: Sequence[Meeting]) -> list[Collective]:
    """One line for each name, the longest first."""
    by_name: dict[str, list[Span]] = defaultdict(list)
    for rank in trace.ranks.values():
        for span in rank.spans:
            if span.category == "collective" and any(s.start_ns <= span.start_ns < s.end_ns for s in trace.steps):
                by_name[span.name].append(span)
    waits: dict[str, int] = defaultdict(int)
    for meeting in met:
        for span in meeting.spans.values():
            waits[meeting.name] += min(meeting.last_ns, span.end_ns) - span.start_ns
    lines = []
    for name, spans in by_name.items():
        num = len(trace.steps) * sum(any(s.name == name for s in rank.spans) for rank in trace.ranks.values())
        size = sum(int(span.args.get("bytes", 0)) for span in spans) / num
        took, wait = sum(span.end_ns - span.start_ns for span in spans) / 1e9 / num, waits[name] / 1e9 / num
        rate = size / (took - wait) / 1e9 if took > wait and size else None
        lines.append(Collective(name=name, num=len(spans) / num, bytes=size, seconds=took, wait_s=wait, gb_per_s=rate))
    return sorted(lines, key=lambda line: -line.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """late_s: seconds of a step by which the rank arrives later than the others and than the error of the clocks
    explains, the median over the steps. is_named: in at least MIN_STEPS steps, it is late in 7 of 8 by more than
    STRAGGLER_SHARE of the phase and half of late_s."""

    phase: str
    rank: int
    late_s: float
    is_named: bool


def stragglers(trace: Trace, met: Sequence[Meeting]) -> list[Straggler]:
    """The latest rank of each phase in which ranks wait for each other."""
    late: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    error = trace.clock_error_ns  # of each meeting: many of them would add up to a delay that no rank has
    for meeting in met:
        for rank in meeting.spans if len(meeting.spans) > 1 else ():
            others = [span.start_ns for member, span in meeting.spans.items() if member != rank]
            lateness = meeting.spans[rank].start_ns - max(others)  # negative if it is earlier than one of them
            late[meeting.phase][rank][meeting.step] += max(lateness - error, min(lateness + error, 0.0)) / 1e9
    latest = []
    for phase, ranks in late.items():
        rank, by_step = max(ranks.items(), key=lambda item: median(item[1].values()))
        times = sorted(by_step.values())
        least = STRAGGLER_SHARE * total(trace.windows(phase)) / 1e9 / len(trace.steps)
        late_s, rarely_s = median(times), times[len(times) // 8]  # with less than 8 steps, the shortest time
        is_named = len(times) >= MIN_STEPS and rarely_s > max(least, late_s / 2)
        latest.append(Straggler(phase=phase, rank=rank, late_s=late_s, is_named=is_named))
    return latest


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a rank executes a command and no operation, collective or copy runs."""

    rank: int
    start_ns: int
    end_ns: int
    where: str


def gaps(trace: Trace, of: dict[int, Lanes]) -> list[Gap]:
    """The gaps of the training commands, the longest first."""
    pauses = []
    for number, rank in trace.ranks.items():
        if rank.profile is not None:
            commands = overlap(rank.of("phase", TRAIN_COMMANDS), trace.windows())
            active = union(of[number].compute, of[number].collective, of[number].copy)
            for start, end in without(commands, active):
                if end - start >= 1_000_000:  # a longer gap between two operations is listed
                    middle = (start + end) // 2
                    on_own_clock = 2 * middle - rank.facts.to_controller(middle)
                    pauses.append(Gap(number, start, end, rank.profile.around(on_own_clock)))
    return sorted(pauses, key=lambda gap: gap.start_ns - gap.end_ns)


def by_cause(trace: Trace, of: dict[int, Lanes], met: Sequence[Meeting]) -> dict[int, dict[str, Intervals]]:
    """All time of the steps of each rank, divided by cause. Each moment has one cause."""
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for meeting in met:
        for member, span in meeting.spans.items():
            if span.category == "collective":
                waits[member].append((span.start_ns, min(meeting.last_ns, span.end_ns)))
    any_command = union(*(lanes.command for lanes in of.values()))
    sampling = union(*(lanes.sampling for lanes in of.values()))
    training = union(*(rank.of("phase", TRAIN_COMMANDS) for rank in trace.ranks.values()))
    divided = {}
    for number, rank in trace.ranks.items():
        lanes, idle = of[number], {"imbalance": sampling} if rank.facts.samples else {"idle_trainers": sampling}
        if not rank.facts.trains:
            idle["idle_samplers"] = training
        causes = {
            "sampling": lanes.sampling,
            "sync": trace.windows("sync"),
            "compute": lanes.compute,
            "wait": union(waits[number]),
            "communication": lanes.collective,
            "copy": lanes.copy,
            "host": lanes.command,
            "reward": without(trace.windows("reward"), any_command),
            **idle,
        }
        divided[number] = divide(trace.windows(), causes, "controller")
    return divided
