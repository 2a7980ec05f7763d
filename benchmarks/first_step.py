"""How many weights the first optimizer step of a run changes. Both trainers' environments can import it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def share_moved(before: Iterable[torch.Tensor], after: Iterable[torch.Tensor], lr: float) -> float:
    """The share of the weights that a step has changed by lr, within 10 %.

    Adam's first step changes a weight by lr * g / (|g| + eps), so by lr wherever the gradient is well above eps: nearly
    all weights. A trainer whose weights are rounded to fewer bits changes them by 0 or by their spacing instead.
    """
    moved = num_weights = 0
    for old, new in zip(before, after, strict=True):
        change = (new.detach().double() - old.detach().double()).abs() / lr
        moved += int(((change - 1).abs() < 0.1).sum())
        num_weights += old.numel()
    return moved / num_weights
