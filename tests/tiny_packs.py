"""Rows of one prompt, and their logprobs in one pack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tiny_samples import random_samples

from meshrl.core.types import Sample
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.train.packing import pack


def answers_to_one_prompt(seed: int, prompt: int, answers: Sequence[int]) -> list[Sample]:
    """A row for each of these lengths, at temperature 1."""
    samples = random_samples(seed, [prompt + n for n in answers], groups=1)
    for s in samples:
        s.prefix_len, s.mask, s.temperature = prompt, np.arange(len(s)) >= prompt, 1.0
        s.tokens[:prompt] = samples[0].tokens[:prompt]
    return samples


def score_pack(
    model: CausalModel, samples: list[Sample], share_prefix: bool = True
) -> tuple[list[torch.Tensor], PackedAttention]:
    """Logprobs of the trained tokens of each sample, and the attention that has computed them."""
    batch = pack(samples, list(range(len(samples))), share_prefix=share_prefix)
    scored = batch.mask.nonzero()[:, 0]
    context = PackedAttention(batch.cu_seqlens.tolist(), torch.device("cpu"), batch.parents)
    inputs = batch.tokens, batch.position_ids, context, scored, batch.previous[scored], batch.temperature[scored]
    logprobs, _ = model(*inputs, 64, False, {})
    row_of = torch.tensor(batch.rows)[torch.searchsorted(batch.cu_seqlens, scored, right=True) - 1]
    return [logprobs[row_of == i] for i in range(len(samples))], context


def plain_logprobs(lm: torch.nn.Module, samples: Sequence[Sample], prompt: int) -> list[torch.Tensor]:
    """Of the answers to a prompt of this length, by Transformers' own forward, row by row."""
    rows = [torch.from_numpy(s.tokens.astype(np.int64)) for s in samples]
    logq = [torch.log_softmax(lm(row[None]).logits[0], -1) for row in rows]
    return [of[:-1].gather(1, row[1:, None])[prompt - 1 :, 0] for of, row in zip(logq, rows, strict=True)]
