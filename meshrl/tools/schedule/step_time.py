"""The step time of each schedule (loop.kind), from the durations of its parts.

    colocated      sampling + training + sync + step_s
    one_step_off   max(sampling, training + step_s) + sync
    fully_async    group by group, with the limits of loops/buffer.py

Sampling is counted in decode steps: a row that joins after step j and has n tokens ends after step j + n, and if all
max_running slots are in use, it joins when a slot becomes free. The steps from i to j take decode_step_s * (j - i) +
decode_row_s * (sum of their rows). After a sync, running rows compute their contexts again. Groups are graded in turn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrl.config.loop import LoopConfig
from meshrl.loops.buffer import GroupLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Durations in seconds. train_token_s: of one rank. request_s: of the controller, for each answer that it starts.
    probe_s: the proof after a sync of stale samples. step_s: what a step needs outside all phases."""

    decode_step_s: float
    decode_row_s: float = 0.0
    prefill_step_s: float = 0.0
    prefill_token_s: float = 0.0
    request_s: float = 0.0
    reward_group_s: float = 0.0
    train_step_s: float = 0.0
    train_token_s: float
    sync_s: float = 0.0
    probe_s: float = 0.0
    step_s: float = 0.0


class Answer(NamedTuple):
    """Tokens of an answer. turns: (the part of the context that no cache has, output) of each turn. trained: of its
    training rows."""

    turns: tuple[tuple[int, int], ...]
    trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A schedule. rollout_ranks: ranks that only sample; 0 = the train ranks sample too. lengths: the answers of each
    group, used in this order and repeated; loop.samples_per_prompt in each."""

    loop: LoopConfig
    train_ranks: int
    rollout_ranks: int
    max_running: int
    costs: Costs
    lengths: Sequence[Sequence[Answer]]

    def group(self, number: int) -> Sequence[Answer]:
        """The answers of this group."""
        return self.lengths[number % len(self.lengths)]

    def with_loop(self, **values: Any) -> Setup:
        """The same with other values of loop.*."""
        return replace(self, loop=self.loop.model_copy(update=values))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over steps. train_idle, rollout_idle: the fraction of a step in which a rank of that side has nothing to
    do."""

    setup: Setup
    step_s: float
    train_idle: float
    rollout_idle: float
    staleness: float
    max_staleness: int

    @property
    def idle(self) -> float:
        """Of all GPUs."""
        train, rollout = self.setup.train_ranks, self.setup.rollout_ranks
        if not rollout:  # the same ranks do both
            return self.train_idle + self.rollout_idle - 1
        return (self.train_idle * train + self.rollout_idle * rollout) / (train + rollout)


FIRST_STEPS = 3  # not counted, because samplers and trainer do not yet overlap as later
STEPS_PER_MESSAGE = 2  # decode steps for which a message to a sampler waits
LEAST_S = 1e-12  # of a decode step

Step = tuple[float, float, float, float, int]  # seconds: total, of trainer, of samplers (mean); staleness: mean, max


def predict(setup: Setup, first: int = FIRST_STEPS) -> Prediction:
    """Means over the steps from number `first` on, without the last ones, in which no groups start."""
    steps = steps_of(setup)[first : max(first + 1, setup.loop.num_steps - 1 - setup.loop.staleness)]
    step_s, train_s, rollout_s, staleness, _ = np.mean(steps, axis=0).tolist()
    return Prediction(setup, step_s, 1 - train_s / step_s, 1 - rollout_s / step_s, staleness, max(s[-1] for s in steps))


def steps_of(setup: Setup) -> list[Step]:
    """All loop.num_steps steps; of one_step_off those before the last one."""
    costs, per_step = setup.costs, setup.loop.prompts_per_step
    if setup.loop.kind == "fully_async":
        return _fully_async(setup)
    batches = [range(step * per_step, (step + 1) * per_step) for step in range(setup.loop.num_steps)]
    sampled, trained = [_sample(setup, batch) for batch in batches], [_train_s(setup, batch) for batch in batches]
    if not setup.loop.staleness:
        sync_s, phases = costs.sync_s, zip(sampled, trained)
        return [(sample_s + s + sync_s + costs.step_s, s + sync_s, busy_s, 0, 0) for (sample_s, busy_s), s in phases]
    sync_s, phases = costs.sync_s + costs.probe_s, zip(sampled[1:], trained)  # the next batch is sampled meanwhile
    return [(max(sample_s, s + costs.step_s) + sync_s, s + sync_s, busy_s, 1, 1) for (sample_s, busy_s), s in phases]


def _train_s(setup: Setup, numbers: Sequence[int]) -> float:
    tokens = sum(answer.trained for number in numbers for answer in setup.group(number))
    return setup.costs.train_step_s + setup.costs.train_token_s * tokens / setup.train_ranks


def _sample(setup: Setup, numbers: Sequence[int]) -> tuple[float, float]:
    """Seconds until these groups are scored if they start together, and of work of a sampler (mean)."""
    samplers, now, graded_at = _Samplers(setup), 0.0, 0.0
    samplers.start(numbers)
    while samplers.rows.size:
        elapsed, ended = samplers.advance(math.inf)
        now += elapsed
        graded_at = max(graded_at, now) + len(ended) * setup.costs.reward_group_s
    return graded_at, float(samplers.busy_s.mean())


class _Samplers:
    """rows: a column of each unfinished row: sampler, group, context tokens, steps at its start, steps at its end.
    groups: sampler of each unfinished group, and steps at the group's end. By sampler: steps = decode steps so far;
    delay_s = what the next one takes in addition; busy_s."""

    def __init__(self, setup: Setup):
        self._setup, self.count = setup, setup.rollout_ranks or setup.train_ranks
        self.rows, self.groups = np.empty((5, 0)), dict[int, tuple[int, float]]()
        self.steps, self.delay_s, self.busy_s = np.zeros((3, self.count))

    @property
    def step_s(self) -> float:
        """Seconds of a decode step, with the mean number of rows."""
        costs = self._setup.costs
        return max(LEAST_S, costs.decode_step_s + costs.decode_row_s * self.rows.shape[1] / self.count)

    def start(self, numbers: Sequence[int]) -> None:
        """Start these groups, each on the sampler with the fewest: the controller sends their requests together."""
        costs, most = self._setup.costs, self._setup.max_running
        slots = [np.sort(self.rows[4, self.rows[0] == sampler])[-most:].tolist() for sampler in range(self.count)]
        num_groups = [sum(sampler == s for sampler, _ in self.groups.values()) for s in range(self.count)]
        wait_s = costs.request_s * len(numbers) * self._setup.loop.samples_per_prompt
        works = np.array(num_groups) > 0
        self.delay_s += ~works * wait_s
        earliest = (self.steps + works * wait_s / self.step_s).tolist()
        prefills, rows = set[tuple[int, float]](), list[tuple[float, ...]]()
        for number in numbers:
            sampler, last = num_groups.index(min(num_groups)), 0.0
            for turns, trained in self._setup.group(number):
                free_at = heapq.heappop(slots[sampler]) if len(slots[sampler]) == most else 0.0
                start = end = max(earliest[sampler], free_at)
                for prefill, output in turns:
                    self.delay_s[sampler] += costs.prefill_token_s * prefill
                    prefills |= {(sampler, end)} if prefill else set()
                    end += max(1, output)
                heapq.heappush(slots[sampler], end)
                rows.append((sampler, number, trained - (end - start), start, end))
                last = max(last, end)
            self.groups[number] = sampler, last
            num_groups[sampler] += 1
        for sampler, _ in prefills:  # rows that join after the same step share it
            self.delay_s[sampler] += costs.prefill_step_s
        self.rows = np.hstack([self.rows, np.array(rows).T])

    def advance(self, most_s: float, is_full: bool = False) -> tuple[float, list[int]]:
        """Decode until the next group ends, for most_s at most. Returns the seconds and the groups that have ended.
        is_full: also until other rows end, so that another group may start; every fourth one, to save time."""
        costs, sampler, (*_, start, end) = self._setup.costs, self.rows[0].astype(int), self.rows
        until = np.full(self.count, np.inf)
        for at, last in self.groups.values():
            until[at] = min(until[at], last)
        if is_full:
            np.minimum.at(until, sampler[::4], end[::4])
        works = until < np.inf
        ahead = np.where(works, until - self.steps, 0.0)
        row_steps = np.maximum(0.0, np.minimum(end, until[sampler]) - np.maximum(start, self.steps[sampler]))
        decode_s = costs.decode_step_s * ahead + costs.decode_row_s * np.bincount(sampler, row_steps, self.count)
        left_s = np.where(works, self.delay_s + decode_s, np.inf)
        elapsed = min(most_s, float(left_s.min()))
        share = np.maximum(0.0, elapsed - self.delay_s) / np.maximum(LEAST_S, decode_s)
        self.steps = np.where(left_s <= elapsed, until, self.steps + ahead * share)
        self.delay_s = np.where(left_s <= elapsed, 0.0, np.maximum(0.0, self.delay_s - elapsed))
        self.busy_s = self.busy_s + elapsed * works
        ended = [number for number, (at, last) in self.groups.items() if last <= self.steps[at]]
        self.drop(ended, end <= self.steps[sampler])
        return elapsed, ended

    def drop(self, numbers: Sequence[int], rows: NDArray[np.bool_]) -> None:
        self.rows = self.rows[:, ~rows]
        self.groups = {number: value for number, value in self.groups.items() if number not in numbers}

    def stop(self) -> None:
        """A sync: after it, the running rows compute their contexts again, or begin again (loop.in_flight)."""
        sampler, (_, group, context, start, end) = self.rows[0].astype(int), self.rows
        produced = np.maximum(0.0, self.steps[sampler] - start)
        tokens = np.bincount(sampler, (produced > 0) * (context + produced), self.count)
        if self._setup.loop.in_flight == "restart":
            self.rows[3:] += produced
            self.groups = {n: (at, float(end[group == n].max())) for n, (at, _) in self.groups.items()}
        again_s = self._setup.costs.prefill_step_s + self._setup.costs.prefill_token_s * tokens
        self.delay_s = np.where(tokens > 0, again_s, self.delay_s) + self._setup.costs.sync_s


def _fully_async(setup: Setup) -> list[Step]:
    loop, costs, samplers = setup.loop, setup.costs, _Samplers(setup)
    limits = GroupLimits(loop, setup.max_running, samplers.count)
    now, graded_at, version, versions = 0.0, 0.0, 0, list[int]()  # versions: of the weights at the start of each group
    scored, steps = list[tuple[float, int]](), list[Step]()  # a heap of (time, group)

    def fill() -> None:
        first, running = len(versions), samplers.rows.shape[1]
        while limits.may_start(running + (len(versions) - first) * loop.samples_per_prompt):
            limits.start(len(versions), version)
            versions.append(version)
        if len(versions) > first:
            samplers.start(range(first, len(versions)))

    def wait(seconds: float) -> None:
        """Sample for this time; infinity: until another group is scored."""
        nonlocal now, graded_at
        end, num_scored = now + seconds, len(limits.scored)
        while now < end and (seconds < math.inf or len(limits.scored) == num_scored):
            elapsed, ended = samplers.advance(min([end, *(at for at, _ in scored[:1])]) - now, limits.may_start(0))
            now += elapsed
            for number in ended:
                graded_at = max(graded_at, now) + costs.reward_group_s
                heapq.heappush(scored, (graded_at, number))
            while scored and scored[0][0] <= now:
                _, number = heapq.heappop(scored)
                if number in limits.versions:  # not dropped
                    limits.end(number)
            fill()

    for step in range(loop.num_steps):
        began, busy_s = now, samplers.busy_s
        limits.begin_step(step)
        fill()
        while (numbers := limits.take(version)) is None:
            wait(math.inf)
        taken, late = numbers
        samplers.drop(late, np.isin(samplers.rows[1], late))
        fill()
        stale, trains_at = [version - versions[number] for number in taken], now
        wait(_train_s(setup, taken))
        wait(STEPS_PER_MESSAGE * samplers.step_s * bool(samplers.groups))
        samplers.stop()
        wait(costs.sync_s)
        version += 1
        wait(costs.probe_s * (loop.staleness > 0))
        wait(costs.step_s)
        train_s, sample_s = now - costs.step_s - trains_at, float((samplers.busy_s - busy_s).mean())
        steps.append((now - began, train_s, sample_s, sum(stale) / len(stale), max(stale)))
    return steps
