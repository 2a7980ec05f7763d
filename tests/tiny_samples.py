"""Samples of random content for tests of packing, training and the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from meshrl.agent.flatten import flatten
from meshrl.core.batch import Batch
from meshrl.core.types import Prompt, Sample, Trajectory, Turn


def random_samples(seed: int, lengths: Sequence[int], vocab: int = 64, groups: int = 3) -> list[Sample]:
    """Samples with random masks, advantages and logprobs; all other arrays that a loss may read are set, too.
    A length of -n makes a row of n tokens that are all masked."""
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(lengths):
        masked, n = n < 0, abs(n)
        mask = rng.random(n) < 0.7
        mask[0] = False
        mask[-1] = True
        if masked:
            mask[:] = False
        out.append(
            Sample(
                trajectory_id=f"t{i}",
                group_id=f"g{i % groups}",
                row=0,
                prefix_len=1,
                tokens=rng.integers(0, vocab, n).astype(np.int32),
                mask=mask,
                turn=np.where(mask, 0, -1).astype(np.int16),
                rollout_logprobs=np.where(mask, -rng.random(n) * 4, np.nan).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                rewards=np.zeros(n, np.float32),
                temperature=float(rng.choice([0.6, 1.0, 1.3])),
                reward=float(rng.random()),
                old_logprobs=np.where(mask, -rng.random(n) * 4, np.nan).astype(np.float32),
                ref_logprobs=np.where(mask, -rng.random(n) * 4, np.nan).astype(np.float32),
                advantages=np.where(mask, rng.standard_normal(n), 0).astype(np.float32),
                loss_weight=np.zeros(n),
            )
        )
    return out


def weigh(samples: list[Sample]) -> list[Sample]:
    """Token-mean weights in fp64."""
    total = sum(int(s.mask.sum()) for s in samples)
    for s in samples:
        s.loss_weight = np.where(s.mask, 1.0 / total, 0.0)
    return samples


def random_groups(seed: int, prompts: Sequence[int], answers: Sequence[int]) -> list[Sample]:
    """One group for each prompt length, with a row for each answer length."""
    rng = np.random.default_rng(seed)
    out = []
    for g, prompt in enumerate(prompts):
        rows = random_samples(seed + g, [prompt + n for n in answers])
        shared = rng.integers(3, 64, prompt).astype(np.int32)
        for i, s in enumerate(rows):
            s.tokens[:prompt] = shared
            s.mask = np.arange(len(s)) >= prompt
            s.advantages = np.where(s.mask, rng.standard_normal(len(s)), 0).astype(np.float32)
            s.old_logprobs = np.where(s.mask, -rng.random(len(s)) * 4, np.nan).astype(np.float32)
            s.ref_logprobs = np.where(s.mask, -rng.random(len(s)) * 4, np.nan).astype(np.float32)
            s.group_id, s.trajectory_id, s.prefix_len = f"g{g}", f"g{g}/{i}", prompt
        out += rows
    return weigh(out)


def turn_sample(turn: Turn, advantage: float) -> Sample:
    """The row of a trajectory of one turn, with weights and this advantage."""
    prompt = Prompt(id="p", ordinal=0, ids=turn.context_ids)
    (sample,) = weigh(flatten([Trajectory(prompt=prompt, group_id="p", index=0, turns=[turn], reward=0.0)])[0])
    sample.advantages = np.where(sample.mask, advantage, 0).astype(np.float32)
    return sample


def sampled_row(logprobs: Sequence[float], mask: Sequence[bool] | None = None, engine_id: str = "sampler") -> Sample:
    """A row with these logprobs of the sampler, at weight version 0; trained where mask is True, by default everywhere.
    Empty rows are allowed."""
    n = len(logprobs)
    trained = np.ones(n, bool) if mask is None else np.array(mask, bool)
    return Sample(
        trajectory_id=f"row of {engine_id}",
        group_id="g",
        row=0,
        prefix_len=0,
        tokens=np.zeros(n, np.int32),
        mask=trained,
        turn=np.zeros(n, np.int16),
        rollout_logprobs=np.array(logprobs, np.float32),
        versions=np.where(trained, 0, -1).astype(np.int32),
        rewards=np.zeros(n, np.float32),
        engine_id=engine_id,
    )


def trained_fields(mask: torch.Tensor, loss_weight: torch.Tensor, cu_seqlens: Sequence[int]) -> dict[str, Any]:
    """The fields of a Batch that follow from these, computed by torch."""
    trained = (mask & (loss_weight != 0)).nonzero()[:, 0]
    segments = torch.searchsorted(torch.tensor(cu_seqlens), trained, right=True)
    lengths = torch.unique_consecutive(segments, return_counts=True)[1].tolist()
    return {"scored": mask.nonzero()[:, 0], "trained": trained, "trained_lengths": lengths}


def with_trained_fields(batch: Batch) -> Batch:
    """The batch after a change of its mask or its weights."""
    return replace(batch, **trained_fields(batch.mask, batch.loss_weight, batch.cu_seqlens.tolist()))
