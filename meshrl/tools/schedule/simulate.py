"""A discrete-event simulation of the three schedules (loop.kind), from the durations of their parts.

It has the rules of meshrl/loops: which groups may start, which ones a step takes (for fully_async, GroupLimits decides
both), and what a sync stops. Assumptions:

- A decode step of a sampler takes decode_step_s + decode_row_s * (running rows), whatever their length; a step in which
  rows join also computes their contexts. After a sync the running rows compute their contexts again.
- Training is linear in tokens and is divided evenly over the train ranks; a sync stops all samplers for sync_s. A
  message to a sampler that decodes waits for STEPS_PER_MESSAGE steps.
- Graders work on one group after another. Tools of agents take no time. Ranks do not slow each other down.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from meshrl.loops.group_limits import GroupLimits
from meshrl.tools.schedule.sampler import Sampler, SimulatedGroup, SimulatedRow
from meshrl.tools.schedule.setup import Setup

Wait = float | None
"""Seconds; None: until another group is scored."""
STEPS_PER_MESSAGE = 2
PROBED_ROWS = 4  # of each sync of stale samples: loops/sync_and_probe.py
FIRST_STEPS = 3  # not counted in a prediction, because samplers and trainer do not yet overlap as later


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """A busy time of the trainer. step: from 0."""

    phase: Literal["train", "sync"]
    step: int
    start: float
    end: float


class Simulation:
    """The clock, the samplers and the graders. A schedule is a generator that yields what it waits for.

    ends: the end of each step. staleness: by step, of each sample.
    """

    def __init__(self, setup: Setup):
        self.setup, self.loop, self.costs = setup, setup.loop, setup.costs
        self.now, self.step, self.version = 0.0, 0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        count = setup.rollout_ranks or setup.train_ranks
        self.samplers = [Sampler(setup.costs, setup.max_running) for _ in range(count)]
        self.groups: list[SimulatedGroup] = []
        self._grader_free_at = 0.0
        self.num_running = self.num_scored = 0  # unfinished answers; groups that were scored so far
        self.on_turn_end: Callable[[], None] = lambda: None
        self.on_scored: Callable[[SimulatedGroup], None] = lambda group: None
        self.ends: list[float] = []
        self.spans: list[SimulatedSpan] = []
        self.staleness: list[list[int]] = []

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def run(self, schedule: Iterator[Wait]) -> None:
        for wait_s in schedule:
            if wait_s is None:
                before = self.num_scored
                while self.num_scored == before:
                    self._next_event()
            else:
                until = self.now + wait_s
                while self._events and self._events[0][0] <= until:
                    self._next_event()
                self.now = until

    def _next_event(self) -> None:
        self.now, _, event = heapq.heappop(self._events)
        event()

    # ---- sampling

    def start(self, count: int) -> list[SimulatedGroup]:
        """Start `count` groups: the controller sends their requests together."""
        new = []
        for number in range(len(self.groups), len(self.groups) + count):
            answers = self.setup.lengths[number % len(self.setup.lengths)]
            sampler = min(self.samplers, key=lambda s: s.num_groups)
            sampler.num_groups += 1
            self.num_running += len(answers)
            new.append(SimulatedGroup(answers, sampler, self.version, number, self.now, unfinished=len(answers)))
        self.groups += new
        rows = [SimulatedRow(group, index, 0) for group in new for index in range(len(group.answers))]
        self.at(self.now + self.costs.request_s * len(rows), lambda: self._send(rows))
        return new

    def _send(self, rows: Sequence[SimulatedRow]) -> None:
        changed = []
        for row in rows:
            if not row.group.dropped:
                row.group.sampler.waiting.append(row)
                changed.append(row.group.sampler)
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

    def _end_turns(self, sampler: Sampler, rows: Sequence[SimulatedRow]) -> None:
        following = []
        for row in rows:
            if row.group.dropped:
                continue
            if row.turn + 1 < len(row.group.answers[row.index].turns):
                following.append(SimulatedRow(row.group, row.index, row.turn + 1))
                continue
            row.group.unfinished -= 1
            self.num_running -= 1
            if not row.group.unfinished:
                row.group.sampler.num_groups -= 1
                self._grader_free_at = max(self._grader_free_at, self.now) + self.costs.reward_group_s
                self.at(self._grader_free_at, partial(self._scored, row.group))
        if following:
            self._send(following)
        if not sampler.running and not sampler.waiting and sampler.busy_since is not None:
            sampler.busy.append((sampler.busy_since, self.now))
            sampler.busy_since = None
        self.on_turn_end()

    def _scored(self, group: SimulatedGroup) -> None:
        group.scored_at = self.now
        self.num_scored += 1
        self.on_scored(group)

    def drop(self, group: SimulatedGroup) -> None:
        group.dropped = True
        if group.unfinished:
            sampler = group.sampler
            self.num_running -= group.unfinished
            sampler.num_groups -= 1
            self._compute(sampler)
            sampler.drop(group)
            self._schedule(sampler)
            self._end_turns(sampler, [])

    def all_scored(self, groups: Sequence[SimulatedGroup]) -> Iterator[Wait]:
        while not all(group.is_scored for group in groups):
            yield None

    # ---- training

    def train(self, groups: Sequence[SimulatedGroup]) -> Iterator[Wait]:
        tokens = sum(answer.trained for group in groups for answer in group.answers)
        started_at = self.now
        self.staleness.append([self.version - oldest for group in groups for oldest in group.oldest.values()])
        for group in groups:
            group.step = self.step
        yield self.costs.train_step_s + self.costs.train_token_s * tokens / self.setup.train_ranks
        self.spans.append(SimulatedSpan("train", self.step, started_at, self.now))

    def sync(self) -> Iterator[Wait]:
        started_at = self.now
        yield self._message_s
        until = self.now + self.costs.sync_s
        for sampler in self.samplers:
            self._compute(sampler)
            sampler.stop(until, restart=self.loop.in_flight == "restart")
            self._schedule(sampler)
        yield self.costs.sync_s
        self.version += 1
        for sampler in self.samplers:
            if sampler.waiting:
                self._continue(sampler)
        if self.loop.staleness:
            yield self.costs.probe_s  # samplers answer it while the trainer trains
        self.spans.append(SimulatedSpan("sync", self.step, started_at, self.now))

    @property
    def _message_s(self) -> float:
        """How long a message to all samplers waits."""
        return STEPS_PER_MESSAGE * max((s.step_s for s in self.samplers if s.running), default=0.0)

    def finish(self) -> None:
        self.ends.append(self.now)
        self.step += 1


def simulate(setup: Setup) -> Simulation:
    """Simulate loop.num_steps steps."""
    sim = Simulation(setup)
    sim.run(SCHEDULES[setup.loop.kind](sim))
    for sampler in sim.samplers:
        if sampler.busy_since is not None:
            sampler.busy.append((sampler.busy_since, sim.now))
    return sim


def _colocated(sim: Simulation) -> Iterator[Wait]:
    while sim.step < sim.loop.num_steps:
        groups = sim.start(sim.loop.prompts_per_step)
        yield from sim.all_scored(groups)
        yield from sim.train(groups)
        yield from sim.sync()
        yield sim.costs.step_s
        sim.finish()


def _one_step_off(sim: Simulation) -> Iterator[Wait]:
    loop, ahead = sim.loop, list[SimulatedGroup]()
    while sim.step < loop.num_steps:
        groups = ahead or sim.start(loop.prompts_per_step)
        yield from sim.all_scored(groups)
        more = loop.staleness and sim.step + 1 < loop.num_steps
        ahead = sim.start(loop.prompts_per_step) if more else []
        yield from sim.train(groups)
        yield sim.costs.step_s
        yield from sim.all_scored(ahead)
        yield from sim.sync()
        sim.finish()


def _fully_async(sim: Simulation) -> Iterator[Wait]:
    loop = sim.loop
    limits = GroupLimits(loop, sim.setup.max_running, len(sim.samplers))

    def fill() -> None:
        count = 0
        while limits.may_start(sim.num_running + count * loop.samples_per_prompt):
            limits.start(len(sim.groups) + count, sim.version)
            count += 1
        if count:
            sim.start(count)

    def scored(group: SimulatedGroup) -> None:
        if not group.dropped:
            limits.end(group.number)
        fill()

    sim.on_turn_end, sim.on_scored = fill, scored
    while sim.step < loop.num_steps:
        limits.begin_step(sim.step)
        fill()
        while (numbers := limits.take(sim.version)) is None:
            yield None
        taken, late = numbers
        for number in late:
            sim.drop(sim.groups[number])
        fill()
        yield from sim.train([sim.groups[number] for number in taken])
        yield from sim.sync()
        yield sim.costs.step_s
        sim.finish()


SCHEDULES: dict[str, Callable[[Simulation], Iterator[Wait]]] = {
    "colocated": _colocated,
    "one_step_off": _one_step_off,
    "fully_async": _fully_async,
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over the steps of a simulation. train_idle, rollout_idle: the fraction of a step in which a rank of that
    side has nothing to do; idle: of all GPUs."""

    sim: Simulation
    step_s: float
    train_idle: float
    rollout_idle: float
    idle: float
    staleness: float
    max_staleness: int

    @property
    def setup(self) -> Setup:
        return self.sim.setup


def predict(setup: Setup, first: int = FIRST_STEPS) -> Prediction:
    """Simulate, and measure the steps from number `first` on, without the last ones, in which no groups start."""
    sim = simulate(setup)
    last = max(first + 1, len(sim.ends) - 1 - setup.loop.staleness)
    start, end = sim.ends[first - 1], sim.ends[last - 1]

    def seconds(low: float, high: float) -> float:
        return max(0.0, min(high, end) - max(low, start))

    wall = end - start
    trained = sum(seconds(span.start, span.end) for span in sim.spans)
    sampled = [sum(seconds(*interval) for interval in sampler.busy) for sampler in sim.samplers]
    train_idle, rollout_idle = 1 - trained / wall, 1 - sum(sampled) / len(sampled) / wall
    if setup.rollout_ranks:
        ranks = setup.train_ranks + setup.rollout_ranks
        idle = (train_idle * setup.train_ranks + rollout_idle * setup.rollout_ranks) / ranks
    else:  # the same ranks do both
        idle = train_idle + rollout_idle - 1
    stale = [s for step in sim.staleness[first:last] for s in step]
    return Prediction(
        sim=sim,
        step_s=wall / (last - first),
        train_idle=train_idle,
        rollout_idle=rollout_idle,
        idle=max(0.0, idle),
        staleness=sum(stale) / max(1, len(stale)),
        max_staleness=max(stale, default=0),
    )
