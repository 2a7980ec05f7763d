"""The input of a simulation: the durations of the parts of a step, the lengths of answers, and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True, slots=True)
class TurnLengths:
    """Tokens of a turn. prefill: the part of the context that no cache has."""

    prefill: int
    context: int
    output: int


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """The turns of a trajectory, and the tokens of its training rows."""

    turns: tuple[TurnLengths, ...]
    trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is simulated. rollout_ranks: ranks that only sample; 0 = the train ranks sample too. lengths: the answers of
    each group, used in this order and repeated; loop.samples_per_prompt in each."""

    loop: LoopConfig
    train_ranks: int
    rollout_ranks: int
    max_running: int
    costs: Costs
    lengths: Sequence[Sequence[AnswerLengths]]

    def with_loop(self, **values: Any) -> Setup:
        """The same with other values of loop.*."""
        return replace(self, loop=self.loop.model_copy(update=values))
