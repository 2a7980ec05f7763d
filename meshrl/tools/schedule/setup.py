"""A schedule with the durations of the parts of a step and the lengths of answers, and what is predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshrl.config.loop import LoopConfig


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
