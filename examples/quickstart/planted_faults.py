"""Three faults for the walk-through in docs/see.md: a reward with a loophole, a loss that lowers the entropy, and a
slow rank. `meshrl train` uses each of them by its dotted path."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from meshrl.algo.losses import LossInputs


def zeros(completion: str, answer: str) -> float:
    """A reward with a loophole: each zero counts, in wrong answers, too."""
    return completion.count("0") / 5


def wrong_entropy_bonus(inputs: LossInputs, coef: float = 20.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A policy gradient with an entropy bonus of the wrong sign: it lowers the entropy."""
    return -inputs.advantages * inputs.logprobs + coef * inputs.entropy, {}


def slow_on_rank_1(inputs: LossInputs, seconds: float = 1.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A policy gradient that takes much longer on rank 1, as on a GPU that is too hot."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == 1:  # before a run starts, its loss is tried without ranks
        until, work = time.monotonic() + seconds, torch.ones(800, 800)
        while time.monotonic() < until:
            work @ work
    return -inputs.advantages * inputs.logprobs, {}
