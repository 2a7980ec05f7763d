"""User-defined losses and advantages, correct and faulty ones, for configs that name `own_algorithms:NAME`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from meshrl.algo.advantages import Group
    from meshrl.algo.losses import LossInputs
    from meshrl.core.types import Sample

Terms = tuple[torch.Tensor, dict[str, torch.Tensor]]


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Terms:
    """The clipped ratio of a row (sequence level); equations 5 and 7 of arXiv 2507.18071."""
    ratio = inputs.row_mean(inputs.logprobs - inputs.old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    return loss, {"ratio_mean": ratio, "clipped": ratio != clipped}


def length_scaled(inputs: LossInputs, scale: float, power: float = 0.5, mode: Literal["sum", "mean"] = "sum") -> Terms:
    """A required argument, two optional ones, and `row_sum`."""
    length = inputs.row_sum(torch.ones_like(inputs.logprobs))
    return -scale * inputs.advantages * inputs.logprobs * length**-power, {}


def of_anything(inputs: LossInputs, **anything: Any) -> Terms:
    return -inputs.advantages * inputs.logprobs, {}


def waits_for(inputs: LossInputs, file: str) -> Terms:
    """While `file` exists, an update waits in the middle, and makes the file `file`.waits."""
    while Path(file).exists():
        Path(f"{file}.waits").touch()
        time.sleep(0.02)
    return -inputs.advantages * inputs.logprobs, {}


def annotated_with_a_tensor(inputs: LossInputs, table: torch.Tensor) -> Terms:
    return -inputs.advantages * inputs.logprobs, {}


def with_a_pair(inputs: LossInputs, clips: tuple[float, float]) -> Terms:
    return -inputs.advantages * inputs.logprobs, {}


def only_entropy(inputs: LossInputs) -> Terms:
    return -inputs.entropy, {}


def of_a_name_for_type_checkers(inputs: LossInputs, row: Sample) -> Terms:
    return -inputs.advantages * inputs.logprobs, {}


def only_keywords(*, scale: float) -> Terms:
    raise NotImplementedError


def mean(inputs: LossInputs) -> Terms:
    return (-inputs.advantages * inputs.logprobs).mean(), {}


def bare(inputs: LossInputs) -> torch.Tensor:
    return -inputs.advantages * inputs.logprobs


def measures_a_mean(inputs: LossInputs) -> Terms:
    return -inputs.advantages * inputs.logprobs, {"entropy_mean": torch.tensor(1.0)}


def measures_the_engines(inputs: LossInputs) -> Terms:
    return -inputs.advantages * inputs.logprobs, {"kl": inputs.logprobs}


def detached(inputs: LossInputs) -> Terms:
    return -inputs.advantages * inputs.logprobs.detach(), {}


not_a_function = 7


def in_place(groups: Sequence[Group]) -> list[np.ndarray]:
    for rewards in (group.rewards for group in groups):
        rewards -= rewards.mean()
        rewards /= 10
    return [group.rewards for group in groups]


def batch_scaled(groups: Sequence[Group]) -> list[np.ndarray]:
    """r - mean of the group, divided by the deviation over all groups."""
    centred = [group.rewards - group.rewards.mean() for group in groups]
    scale = np.concatenate(centred).std() + 1e-6
    return [values / scale for values in centred]


def by_token(groups: Sequence[Group]) -> list[list[list[np.ndarray]]]:
    """The reward of a trajectory, divided by the token's position in the row."""
    return [
        [[reward / np.arange(1, len(row) + 1) for row in rows] for reward, rows in zip(group.rewards, group.rows)]
        for group in groups
    ]


def of_two_arguments(groups: Sequence[Group], eps: float) -> list[np.ndarray]:
    raise NotImplementedError


def of_the_first_group(groups: Sequence[Group]) -> list[np.ndarray]:
    return [groups[0].rewards]


def of_nothing(groups: Sequence[Group]) -> None:
    return None


def of_half_a_group(groups: Sequence[Group]) -> list[np.ndarray]:
    return [group.rewards[: len(group.rewards) // 2] for group in groups]


def of_three_tokens(groups: Sequence[Group]) -> list[list[np.ndarray]]:
    return [[np.zeros(99)] * len(group.rewards) for group in groups]


def divided_by_the_spread(groups: Sequence[Group]) -> list[np.ndarray]:
    """NaN for a group of equal rewards."""
    with np.errstate(invalid="ignore"):
        return [(group.rewards - group.rewards.mean()) / group.rewards.std() for group in groups]


def not_finite(groups: Sequence[Group]) -> list[np.ndarray]:
    return [group.rewards / 0.0 for group in groups]


def above_float32(groups: Sequence[Group]) -> list[list[float]]:
    """Finite as Python's float only."""
    return [[1e300] * len(group.rewards) for group in groups]
