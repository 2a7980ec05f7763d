from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from meshrl.config.base import Slice
from meshrl.config.kinds import REWARDS, described

MAX_REWARD = 1e12
"""Limit of the size of a reward: its square times the number of samples of any step is far below the largest float32,
3.4e38, so that no sum or group statistic of rewards overflows."""
_MAX_WEIGHT = 1e6


class RewardTerm(Slice):
    kind: str = Field(
        description=f"{described(REWARDS)} (args: docs/data.md, docs/judges.md), or a function as package.module:name"
    )
    weight: float = Field(1.0, ge=-_MAX_WEIGHT, le=_MAX_WEIGHT)
    """factor in the weighted sum; below 0 is a penalty"""
    args: dict[str, Any] = Field({})
    """keyword arguments of the function"""
    envs: list[str] | None = None
    """the `env` of the rows that the term grades: names of data.sources and data.eval_sets, or what data.map returns as
    env; null = all rows"""

    def grades(self, env: str) -> bool:
        return self.envs is None or env in self.envs


PassScore = float | dict[str, float]
"""The lowest score that passes, or for weighted sums its part of each term: the parts of the terms that apply to an
answer are added."""


def full_rewards(terms: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """By term the weighted value of a full score, 1 for a user's function, in each term with a weight above 0, without
    terms whose full score is 0. terms: (name, kind, weight)."""
    full = [(name, weight * (REWARDS[kind].full_score if kind in REWARDS else 1.0)) for name, kind, weight in terms]
    return {name: score for name, score in full if score > 0}


def has_passed(score: float | None, rewards: Mapping[str, object], pass_score: PassScore) -> bool:
    """score: None = not graded. rewards: of each term of the answer, None = it does not apply."""
    if isinstance(pass_score, dict):
        pass_score = sum((part for name, part in pass_score.items() if rewards.get(name, 0.0) is not None), 0.0)
    return score is not None and score >= pass_score


class RewardConfig(Slice):
    terms: dict[str, RewardTerm] = Field({"answer": RewardTerm(kind="math_answer")})
    """the terms by name; their weighted sum is the reward"""
    num_workers: int = Field(1, ge=1)
    """worker processes that grade completions; they load no model"""
    timeout_s: float = Field(10.0, gt=0)
    """seconds that one grading may take; then its worker is killed"""
    max_memory_bytes: int = Field(2 << 30, ge=64 << 20)
    """limit of the address space of one worker, in bytes"""
    max_failure_fraction: float = Field(0.2, ge=0, le=1)
    """share of a step's answers that may be without a reward because a grading failed, and of an evaluation's attempts
    without a score; with a higher share the run ends"""
