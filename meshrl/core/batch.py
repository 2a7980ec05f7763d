"""Batch: one packed micro-batch of one rank, and what a forward pass returns for it.

T packed tokens, S rows. Rows lie one after the other: row s is tokens[cu_seqlens[s]:cu_seqlens[s+1]].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from meshrl.core.types import Metric


@dataclass(kw_only=True, slots=True)
class Batch:
    """One micro-batch of one rank. Filled by train/packing from Samples; every per-token field is [T].

    A row is never split over micro-batches. Optional fields are None when no sample has them.
    rows[s] is the index of row s in the step's list of samples; -1 for a dummy row.

    Example, two rows of 3 and 2 tokens: tokens [5], cu_seqlens [0, 3, 5], position_ids [0, 1, 2, 0, 1].
    """

    tokens: torch.Tensor  # int64[T]
    cu_seqlens: torch.Tensor  # int32[S+1], on the CPU: lengths steer Python loops and kernels alike
    position_ids: torch.Tensor  # int64[T]; [3, T] for mrope
    sample_index: torch.Tensor  # int32[T]: row s of each token
    rows: list[int]  # [S]
    mask: torch.Tensor  # bool
    loss_weight: torch.Tensor  # float32; 0 outside the mask
    temperature: torch.Tensor  # float32
    rollout_logprobs: torch.Tensor  # float32, NaN where not sampled
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None  # int16[T, L, K]
    token_extras: dict[str, torch.Tensor] = field(default_factory=dict)
    model_kwargs: dict[str, Any] = field(default_factory=dict)  # pixel_values, image_grid_thw, ...
    plan_hash: str = ""
    is_dummy: bool = False

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(kw_only=True, slots=True)
class Outputs:
    """What the model says about a Batch, each float32[T], index t about token t; garbage where mask is False.

    entropy carries a gradient only when the loss asked for it.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None


LossFn = Callable[[Outputs, Batch], tuple[torch.Tensor, list[Metric]]]
"""Pure: (outputs, batch) -> (sum over tokens of loss_weight * loss, metrics). No means, no collectives."""
