"""The step time of each schedule (loop.kind), from the durations of its parts.

    colocated      sampling + training + sync + step_s
    one_step_off   max(sampling, training + step_s) + sync
    fully_async    group by group, with the limits of loops/buffer.py

Sampling is counted in decode steps: a row that joins after step j and has n tokens ends after step j + n, and if all
max_running slots are in use, it joins when a slot becomes free. The steps from i to j take decode_step_s * (j - i) +
decode_row_s * (sum of their rows). After a sync, running rows compute their contexts again. Groups are graded in turn.
Several samplers count the same steps, with the mean number of rows of those that have a group.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
    kind, costs = setup.loop.kind, setup.costs
    if kind == "fully_async":
        return _simulated(setup, setup.max_running)
    alone = {"kind": "fully_async", "max_staleness": 0, "oversampling": 0.0}
    in_turn = _simulated(setup.with_loop(**alone), sys.maxsize)
    if not setup.loop.staleness:
        return in_turn
    sync_s, steps = costs.sync_s + costs.probe_s, list[Step]()
    for (_, synced_s, *_), (next_s, next_synced_s, busy_s, *_) in pairwise(in_turn):
        sample_s, train_s = next_s - next_synced_s - costs.step_s, synced_s - costs.sync_s
        steps.append((max(sample_s, train_s + costs.step_s) + sync_s, train_s + sync_s, busy_s, 1, 1))
    return steps


class _Samplers:
    """All samplers, each with the mean number of rows of those that have one. rows: a column of each unfinished row:
    group, context tokens, steps at its start, steps at its end. groups: steps at the end of each unfinished one. steps:
    decode steps so far. delay_s: what the next one takes in addition. busy_s: the mean of a sampler."""

    def __init__(self, setup: Setup):
        self._setup, self.count = setup, setup.rollout_ranks or setup.train_ranks
        self.rows, self.groups = np.empty((4, 0)), dict[int, float]()
        self.steps = self.delay_s = self.busy_s = 0.0

    @property
    def _num_busy(self) -> int:
        return min(self.count, max(1, len(self.groups)))

    @property
    def step_s(self) -> float:
        """Seconds of a decode step."""
        costs = self._setup.costs
        return max(LEAST_S, costs.decode_step_s + costs.decode_row_s * self.rows.shape[1] / self._num_busy)

    def start(self, numbers: Sequence[int]) -> None:
        """Start these groups; the controller sends their requests together."""
        costs, most = self._setup.costs, self._setup.max_running * self.count
        wait_s = costs.request_s * len(numbers) * self._setup.loop.samples_per_prompt
        earliest = self.steps + (wait_s / self.step_s if self.groups else 0.0)
        self.delay_s += 0.0 if self.groups else wait_s
        slots, rows = np.sort(self.rows[3])[-most:].tolist(), list[tuple[float, ...]]()
        tokens, prefills = 0, Counter[float]()  # by the step in which they are computed
        for number in numbers:
            for turns, trained in self._setup.group(number):
                start = end = max(earliest, heapq.heappop(slots) if len(slots) == most else 0.0)
                for prefill, output in turns:
                    tokens += prefill
                    prefills[end] += prefill > 0
                    end += max(1, output)
                heapq.heappush(slots, end)
                rows.append((number, trained - (end - start), start, end))
                self.groups[number] = max(self.groups.get(number, 0.0), end)
        shared = sum(min(num, self.count) for num in prefills.values())  # rows of a sampler and a step share it
        self.delay_s += (costs.prefill_token_s * tokens + costs.prefill_step_s * shared) / self.count
        self.rows = np.hstack([self.rows, np.array(rows).T])

    def advance(self, most_s: float, is_full: bool) -> tuple[float, list[int]]:
        """Decode until the next group ends, for most_s at most. Returns the seconds and the groups that have ended.
        is_full: also until other rows end, so that another group may start; every fourth one, to save time."""
        costs, (*_, start, end) = self._setup.costs, self.rows
        if not self.groups:
            self.delay_s = max(0.0, self.delay_s - most_s)
            return most_s, []
        until = min(*self.groups.values(), *(end[::4] if is_full else ()), math.inf)
        row_steps = float(np.maximum(0.0, np.minimum(end, until) - np.maximum(start, self.steps)).sum())
        decode_s = costs.decode_step_s * (until - self.steps) + costs.decode_row_s * row_steps / self._num_busy
        elapsed = min(most_s, self.delay_s + decode_s)
        share = max(0.0, elapsed - self.delay_s) / max(LEAST_S, decode_s)
        self.busy_s += elapsed * self._num_busy / self.count
        self.steps = until if elapsed == self.delay_s + decode_s else self.steps + (until - self.steps) * share
        self.delay_s = max(0.0, self.delay_s - elapsed)
        ended = [number for number, last in self.groups.items() if last <= self.steps]
        self.drop(ended, end <= self.steps)
        return elapsed, ended

    def drop(self, numbers: Sequence[int], rows: NDArray[np.bool_]) -> None:
        self.rows = self.rows[:, ~rows]
        for number in numbers:
            self.groups.pop(number, None)

    def stop(self) -> None:
        """A sync: after it, the running rows compute their contexts again, or begin again (loop.in_flight)."""
        costs, (group, context, start, end) = self._setup.costs, self.rows
        produced = np.maximum(0.0, self.steps - start)
        tokens = float(((produced > 0) * (context + produced)).sum())
        if self._setup.loop.in_flight == "restart":
            self.rows[2:] += produced
            self.groups = {number: float(end[group == number].max()) for number in self.groups}
        again_s = costs.prefill_step_s + costs.prefill_token_s * tokens / self._num_busy
        self.delay_s = (again_s if tokens else self.delay_s) + costs.sync_s


def _simulated(setup: Setup, max_running: int) -> list[Step]:
    """The steps of fully_async, group by group. max_running: with which groups start."""
    loop, costs, samplers = setup.loop, setup.costs, _Samplers(setup)
    limits = GroupLimits(loop, max_running, samplers.count)
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
        samplers.drop(late, np.isin(samplers.rows[0], late))
        fill()
        stale, trains_at = [version - versions[number] for number in taken], now
        tokens = sum(answer.trained for number in taken for answer in setup.group(number))
        wait(costs.train_step_s + costs.train_token_s * tokens / setup.train_ranks)
        wait(STEPS_PER_MESSAGE * samplers.step_s * bool(samplers.groups))
        samplers.stop()
        wait(costs.sync_s)
        version += 1
        wait(costs.probe_s * (loop.staleness > 0))
        wait(costs.step_s)
        train_s, sample_s = now - costs.step_s - trains_at, samplers.busy_s - busy_s
        steps.append((now - began, train_s, sample_s, sum(stale) / len(stale), max(stale)))
    return steps
