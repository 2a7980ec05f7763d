"""A simulated rank that samples, and the groups of answers that it gets."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshrl.tools.schedule.setup import AnswerLengths, Costs, TurnLengths


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    """started_at, scored_at: times; NaN until then. version: of the weights at its start. oldest: the version of the
    first token of each answer. step: in which it was trained; None = not yet, or dropped."""

    answers: Sequence[AnswerLengths]
    sampler: Sampler
    version: int
    number: int
    started_at: float
    unfinished: int
    oldest: dict[int, int] = field(default_factory=dict)
    scored_at: float = math.nan
    step: int | None = None
    dropped: bool = False

    @property
    def is_scored(self) -> bool:
        return not math.isnan(self.scored_at)


@dataclass(eq=False, slots=True)
class SimulatedRow:
    """One turn in a sampler. produced: tokens that it had when it (last) joined."""

    group: SimulatedGroup
    index: int
    turn: int
    produced: int = 0

    @property
    def lengths(self) -> TurnLengths:
        return self.group.answers[self.index].turns[self.turn]


class Sampler:
    """A rank that samples. Rows join and end at the boundaries of decode steps; `since` is the last known boundary, and
    `delay_s` what the next step takes in addition to its decoding."""

    def __init__(self, costs: Costs, max_running: int):
        self._costs, self._max_running = costs, max_running
        self.waiting: deque[SimulatedRow] = deque()
        self.running: list[tuple[int, int, SimulatedRow]] = []  # a heap: (step after which it ends, order, row)
        self._order = itertools.count()
        self._steps = 0
        self.since = self.delay_s = 0.0
        self.num_groups = 0
        self.change = 0  # events of an earlier state are ignored
        self.busy: list[tuple[float, float]] = []
        self.busy_since: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a decode step."""
        return max(self._costs.decode_step_s + self._costs.decode_row_s * len(self.running), 1e-12)

    @property
    def next_end(self) -> float:
        """When the next running row ends."""
        return self.since + self.delay_s + (self.running[0][0] - self._steps) * self.step_s

    def advance(self, now: float) -> list[SimulatedRow]:
        """Continue to the end of the step that is computed at `now`. Returns the rows that end there."""
        self.change += 1
        if not self.running:
            self.since = max(self.since, now)
            return []
        if now > self.since:
            most = self.running[0][0] - self._steps
            count = min(most, max(1, math.ceil((now - self.since - self.delay_s) / self.step_s - 1e-6)))
            self.since += self.delay_s + count * self.step_s
            self._steps, self.delay_s = self._steps + count, 0.0
        ended = []
        while self.running and self.running[0][0] <= self._steps:
            ended.append(heapq.heappop(self.running)[2])
        return ended

    def admit(self, version: int) -> None:
        """Let waiting rows join the next step."""
        tokens = 0
        while self.waiting and len(self.running) < self._max_running:
            row = self.waiting.popleft()
            tokens += row.lengths.prefill + row.produced
            row.group.oldest.setdefault(row.index, version)
            self._push(row)
        if tokens:
            self.delay_s += self._costs.prefill_step_s * (self.delay_s == 0) + self._costs.prefill_token_s * tokens

    def stop(self, until: float, restart: bool) -> None:
        """A sync: nothing runs until then, and the running rows compute their contexts again, or begin again."""
        rows, self.running = sorted(self.running, key=lambda entry: entry[1]), []
        tokens = 0
        for last, _, row in rows:
            row.produced = 0 if restart else row.lengths.output - (last - self._steps)
            if restart and row.turn == 0:
                row.group.oldest.pop(row.index)
            tokens += row.lengths.context + row.produced
        self.since = max(self.since, until)
        if restart:
            self.waiting.extendleft(row for _, _, row in reversed(rows))
        else:
            for _, _, row in rows:
                self._push(row)
            self.delay_s = (self._costs.prefill_step_s + self._costs.prefill_token_s * tokens) if rows else 0.0

    def drop(self, group: SimulatedGroup) -> None:
        self.waiting = deque(row for row in self.waiting if row.group is not group)
        self.running = [entry for entry in self.running if entry[2].group is not group]
        heapq.heapify(self.running)

    def _push(self, row: SimulatedRow) -> None:
        left = max(1, row.lengths.output - row.produced)
        heapq.heappush(self.running, (self._steps + left, next(self._order), row))
