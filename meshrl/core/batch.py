"""Batch: one packed micro-batch of one rank, and what a forward pass returns for it.

T packed tokens, S segments, one after the other: segment s is tokens[cu_seqlens[s]:cu_seqlens[s+1]]. A segment is a
complete row; or a prompt that rows of a group share, or the part of such a row after its prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from meshrl.core.types import Metric


@dataclass(kw_only=True, slots=True)
class Batch:
    """One micro-batch of one rank. Filled by train/packing from Samples; every per-token field is [T].

    A row is never split over micro-batches. Optional fields are None when no sample has them.
    rows[s] is the index of segment s's row in the step's list of samples; -1 for a dummy and for a shared prompt.
    parents[s] is the segment that s continues, -1 for none. offsets[s] is the index in the row of the segment's first
    token. previous[t] is the index whose hidden state predicts token t; 0 for the first token of a row, which has none.

    Example, two rows of 3 and 2 tokens: tokens [5], cu_seqlens [0, 3, 5], position_ids [0, 1, 2, 0, 1].
    With a first token in common: tokens [4], cu_seqlens [0, 1, 3, 4], position_ids [0, 1, 2, 1], rows [-1, 0, 1],
    parents [-1, 0, 0], offsets [0, 1, 1], previous [0, 0, 1, 0].
    """

    tokens: torch.Tensor  # int64[T]
    cu_seqlens: torch.Tensor  # int32[S+1], on the CPU: Python loops and kernels use the lengths
    position_ids: torch.Tensor  # int64[T]; [3, T] for mrope
    previous: torch.Tensor  # int64[T]
    rows: list[int]  # [S]
    parents: list[int]  # [S]
    offsets: list[int]  # [S]
    mask: torch.Tensor  # bool
    scored: torch.Tensor  # int64[N]: the tokens in the mask, ordered by the chunk of their previous token
    trained: torch.Tensor  # int64[M]: those of them with a loss_weight
    trained_lengths: list[int]  # the number of trained tokens of each segment that has any, on the CPU
    loss_weight: torch.Tensor  # float32; 0 outside the mask
    temperature: torch.Tensor  # float32
    rollout_logprobs: torch.Tensor  # float32, NaN where not sampled
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None  # int16[T, L, K]
    token_extras: dict[str, torch.Tensor] = field(default_factory=dict)
    scored_of_chunk: list[int] = field(default_factory=list)  # how many of `scored` each rank of ulysses scores
    model_kwargs: dict[str, Any] = field(default_factory=dict)  # pixel_values, image_grid_thw, ...
    mutual: Any = None  # tokens that see each other (model/inputs.py)
    is_dummy: bool = False

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    def rows_of_tokens(self) -> torch.Tensor:
        """int64[T]: how many rows each token is a part of, on its device."""
        children = Counter(self.parents)
        of_segment = [(row >= 0) + children[s] for s, row in enumerate(self.rows)]
        return torch.tensor(of_segment).repeat_interleave(self.cu_seqlens.diff()).to(self.tokens.device)


@dataclass(kw_only=True, slots=True)
class Outputs:
    """Output of a forward pass over a Batch: each float32[T], index t for token t; undefined where mask is False.

    entropy carries a gradient only when the loss asked for it.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None


LossFn = Callable[[Outputs, Batch], tuple[torch.Tensor, Iterable[Metric]]]
"""Pure: (outputs, batch) -> (sum over tokens of loss_weight * loss, metrics). No means, no collectives. The metrics may
wait for the device when they are iterated, which is done once, at the end of an update."""
