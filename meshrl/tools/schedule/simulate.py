"""A discrete-event simulation of the three schedules (loop.kind), from the durations of their parts.

It has the rules of meshrl/loops: which groups may start, which ones a step takes, and what a sync stops. Assumptions:

- A decode step of a sampler takes decode_step_s + decode_row_s * (running rows), whatever their length; a step in which
  rows join also computes their contexts. After a sync the running rows compute their contexts again.
- Training is linear in tokens and is divided evenly over the train ranks; a sync stops all samplers for sync_s. A
  message to a sampler that decodes waits for STEPS_PER_MESSAGE steps.
- Graders work on one group after another. Tools of agents take no time. Ranks do not slow each other down.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshrl.tools.schedule.sampler import Group, Row, Sampler
from meshrl.tools.schedule.setup import Kind, Setup

Wait = float | Callable[[], bool]
"""Seconds, or a condition that becomes true when some group is scored."""
STEPS_PER_MESSAGE = 2
PROBED_ROWS = 4  # of each sync of stale samples, one after another: loops/step.py


@dataclass(frozen=True, slots=True)
class Span:
    """A busy time of the trainer. step: from 0."""

    phase: Literal["train", "sync"]
    step: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """ends: the end of each step. busy: intervals in which each sampler had requests. staleness: by step, of each
    sample."""

    setup: Setup
    ends: list[float]
    spans: list[Span]
    busy: list[list[tuple[float, float]]]
    groups: list[Group]
    staleness: list[list[int]]


class Simulation:
    """The clock, the samplers and the graders. A schedule is a generator that yields what it waits for."""

    def __init__(self, setup: Setup):
        self.setup, self.costs = setup, setup.costs
        self.now, self.step, self.version = 0.0, 0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        count = setup.rollout_ranks or setup.train_ranks
        self.samplers = [Sampler(setup.costs, setup.max_running) for _ in range(count)]
        self._rank_of: dict[int, Sampler] = {}  # of unfinished groups
        self.groups: list[Group] = []
        self._grader_free_at = 0.0
        self.num_running = self.num_scored = 0  # unfinished answers; groups that were scored so far
        self.on_change: Callable[[], None] = lambda: None  # a turn has ended, or a group is scored
        self.ends: list[float] = []
        self.spans: list[Span] = []
        self.staleness: list[list[int]] = []

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def run(self, schedule: Iterator[Wait]) -> None:
        for wait in schedule:
            if callable(wait):
                while not wait():
                    before = self.num_scored
                    while self.num_scored == before:
                        self._next_event()
            else:
                until = self.now + wait
                while self._events and self._events[0][0] <= until:
                    self._next_event()
                self.now = until

    def _next_event(self) -> None:
        self.now, _, event = heapq.heappop(self._events)
        event()

    # ---- sampling

    def start(self, count: int) -> list[Group]:
        """Start `count` groups: the controller sends their requests together."""
        new = []
        for _ in range(count):
            number = len(self.groups)
            answers = self.setup.lengths[number % len(self.setup.lengths)]
            size = len(answers)
            group = Group(answers, self.version, number, self.now, unfinished=size)
            self.num_running += size
            self._rank_of[number] = sampler = min(self.samplers, key=lambda s: s.num_groups)
            sampler.num_groups += 1
            self.groups.append(group)
            new.append(group)
        rows = [Row(group, index, 0) for group in new for index in range(len(group.answers))]
        self.at(self.now + self.costs.request_s * len(rows), lambda: self._send(rows))
        return new

    def _send(self, rows: Sequence[Row]) -> None:
        changed = []
        for row in rows:
            if not row.group.dropped:
                sampler = self._rank_of[row.group.number]
                sampler.waiting.append(row)
                changed.append(sampler)
        for sampler in dict.fromkeys(changed):
            self._continue(sampler)

    def _continue(self, sampler: Sampler) -> None:
        """Compute up to the current time, and let rows join."""
        if sampler.busy_since is None:
            sampler.busy_since = self.now
        self._compute(sampler)
        sampler.admit(self.version)
        self._schedule(sampler)

    def _compute(self, sampler: Sampler) -> None:
        if ended := sampler.advance(self.now):
            self.at(sampler.since, lambda: self._end_turns(sampler, ended))

    def _schedule(self, sampler: Sampler) -> None:
        """Continue when the next row ends, unless something changes before."""
        change = sampler.change
        if sampler.running:
            self.at(sampler.next_end, lambda: self._continue(sampler) if sampler.change == change else None)

    def _end_turns(self, sampler: Sampler, rows: Sequence[Row]) -> None:
        following = []
        for row in rows:
            if row.group.dropped:
                continue
            if row.turn + 1 < len(row.group.answers[row.index].turns):
                following.append(Row(row.group, row.index, row.turn + 1))
                continue
            row.group.unfinished -= 1
            self.num_running -= 1
            if not row.group.unfinished:
                self._grade(row.group)
        if following:
            self._send(following)
        if not sampler.running and not sampler.waiting and sampler.busy_since is not None:
            sampler.busy.append((sampler.busy_since, self.now))
            sampler.busy_since = None
        self.on_change()

    def _grade(self, group: Group) -> None:
        self._rank_of.pop(group.number).num_groups -= 1
        self._grader_free_at = max(self._grader_free_at, self.now) + self.costs.reward_group_s

        def scored() -> None:
            group.scored_at = self.now
            self.num_scored += 1
            self.on_change()

        self.at(self._grader_free_at, scored)

    def drop(self, group: Group) -> None:
        group.dropped = True
        self.num_running -= group.unfinished
        if sampler := self._rank_of.pop(group.number, None):
            sampler.num_groups -= 1
            self._compute(sampler)
            sampler.drop(group)
            self._schedule(sampler)
            self._end_turns(sampler, [])

    # ---- training

    def train(self, groups: Sequence[Group]) -> Iterator[Wait]:
        tokens = sum(answer.trained for group in groups for answer in group.answers)
        began = self.now
        self.staleness.append([self.version - oldest for group in groups for oldest in group.oldest.values()])
        for group in groups:
            group.step = self.step
        yield self.costs.train_step_s + self.costs.train_token_s * tokens / self.setup.train_ranks
        self.spans.append(Span("train", self.step, began, self.now))

    def sync(self) -> Iterator[Wait]:
        began = self.now
        yield self._message_s
        until = self.now + self.costs.sync_s
        for sampler in self.samplers:
            self._compute(sampler)
            sampler.stop(until, restart=self.setup.in_flight == "restart")
            self._schedule(sampler)
        yield self.costs.sync_s
        self.version += 1
        for sampler in self.samplers:
            if sampler.waiting:
                self._continue(sampler)
        if self.setup.max_staleness:
            first_s = max((sampler.delay_s for sampler in self.samplers), default=0.0)  # a message waits for it, too
            yield first_s + self.costs.probe_s + PROBED_ROWS * self._message_s
        self.spans.append(Span("sync", self.step, began, self.now))

    @property
    def _message_s(self) -> float:
        """How long a message to all samplers waits."""
        return STEPS_PER_MESSAGE * max((s.step_s for s in self.samplers if s.running), default=0.0)

    def finish(self) -> None:
        self.ends.append(self.now)
        self.step += 1


def simulate(setup: Setup) -> Timeline:
    """Simulate setup.num_steps steps."""
    sim = Simulation(setup)
    sim.run(SCHEDULES[setup.kind](sim))
    for sampler in sim.samplers:
        if sampler.busy_since is not None:
            sampler.busy.append((sampler.busy_since, sim.now))
    return Timeline(
        setup=setup,
        ends=sim.ends,
        spans=sim.spans,
        busy=[sampler.busy for sampler in sim.samplers],
        groups=sim.groups,
        staleness=sim.staleness,
    )


def _scored(groups: Sequence[Group]) -> Callable[[], bool]:
    return lambda: all(group.is_scored for group in groups)


def _colocated(sim: Simulation) -> Iterator[Wait]:
    while sim.step < sim.setup.num_steps:
        groups = sim.start(sim.setup.prompts_per_step)
        yield _scored(groups)
        yield from sim.train(groups)
        yield from sim.sync()
        yield sim.costs.step_s
        sim.finish()


def _one_step_off(sim: Simulation) -> Iterator[Wait]:
    setup, ahead = sim.setup, list[Group]()
    while sim.step < setup.num_steps:
        groups = ahead or sim.start(setup.prompts_per_step)
        yield _scored(groups)
        more = setup.max_staleness and sim.step + 1 < setup.num_steps
        ahead = sim.start(setup.prompts_per_step) if more else []
        yield from sim.train(groups)
        yield sim.costs.step_s
        yield _scored(ahead)
        yield from sim.sync()
        sim.finish()


def _fully_async(sim: Simulation) -> Iterator[Wait]:
    """The rules of meshrl/loops/buffer.py."""
    setup, per_step = sim.setup, sim.setup.prompts_per_step
    spare, group_size = math.ceil(setup.oversampling * per_step), max(map(len, setup.lengths))
    capacity = max(setup.max_running, group_size) * len(sim.samplers)
    held: list[Group] = []
    taking_for = num_taken = num_dropped = 0
    window = least = min(2, setup.max_staleness + 1) * per_step
    waited = False

    def fill() -> None:
        if setup.max_staleness == 0 and num_taken > taking_for * per_step:
            return
        limit = min(taking_for + setup.max_staleness + 1, setup.num_steps) * per_step + spare
        limit = min(limit - num_taken - num_dropped, window + spare)
        load, count = sim.num_running, 0
        while len(held) + count < limit:
            size = len(setup.lengths[(len(sim.groups) + count) % len(setup.lengths)])
            if load and load + size > capacity:
                break
            load, count = load + size, count + 1
        if count:
            held.extend(sim.start(count))

    def ready() -> tuple[list[Group], list[Group]] | None:
        nonlocal waited
        by_age = sorted(held, key=lambda group: (group.version, group.number))
        scored = [group for group in by_age if group.is_scored][:per_step]
        left = [group for group in by_age if group not in scored]
        oldest = sim.version - setup.max_staleness
        too_many = any(
            sum(group.version <= oldest + later for group in left) > later * per_step + spare
            for later in range(max(1, setup.max_staleness))
        )
        if len(scored) < per_step or too_many:  # the next steps could not train all groups that become too old
            waited |= len(scored) < per_step
            return None
        return scored, [group for group in left if group.version <= oldest]

    sim.on_change = fill
    while sim.step < setup.num_steps:
        taking_for, num_dropped, waited = sim.step, 0, False  # dropped groups are not replaced before the next step
        fill()
        yield lambda: ready() is not None
        found = ready()
        assert found is not None
        scored, late = found
        num_left = sum(group.is_scored for group in held) - per_step
        if waited:
            window = min((setup.max_staleness + 1) * per_step, window + max(1, per_step // 2))
        elif num_left >= per_step // 2:
            window = max(least, window - max(1, per_step // 8))
        held = [group for group in held if group not in scored and group not in late]
        num_taken, num_dropped = num_taken + len(scored), len(late)
        for group in late:
            sim.drop(group)
        fill()
        yield from sim.train(scored)
        yield from sim.sync()
        yield sim.costs.step_s
        sim.finish()


SCHEDULES: dict[Kind, Callable[[Simulation], Iterator[Wait]]] = {
    "colocated": _colocated,
    "one_step_off": _one_step_off,
    "fully_async": _fully_async,
}
