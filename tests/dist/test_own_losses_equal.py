"""A loss of complete rows gives the unsharded model's gradient for every aggregation and partition, and masked
truncated answers change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import partitioned, random_partition, unsharded, worst
from tiny_models import tiny_qwen2
from tiny_samples import random_groups

from meshrl.algo.losses import LOSSES, make_policy_loss
from meshrl.algo.reduce import AGGREGATIONS, assign_loss_weights
from meshrl.config.algo import AlgoConfig, KlConfig, LossConfig, UserLossConfig
from meshrl.core.batch import Batch, Outputs
from meshrl.core.types import Metric, Sample

CLIP_LOW, CLIP_HIGH, KL_COEF = 0.9, 1.5, 0.1
LOSS = UserLossConfig(kind="own_algorithms:gspo", clip_low=CLIP_LOW, clip_high=CLIP_HIGH)


def _cfg(**changes: Any) -> AlgoConfig:
    return AlgoConfig(loss=LOSS, kl=KlConfig(coef=KL_COEF, estimator="k2"), **changes)


def _of_one_row(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, list[Metric]]:
    """GSPO and a k2 KL on a batch of one row, written from the paper without meshrl.algo."""
    at = batch.mask
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None and batch.advantages is not None
    new, advantages = outputs.logprobs[at], batch.advantages[at].double()
    if not len(new):
        return outputs.logprobs.sum(), []
    s = torch.exp((new - batch.old_logprobs[at]).sum() / len(new))
    objective = torch.minimum(s * advantages, torch.clip(s, 1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    kl = 0.5 * (batch.ref_logprobs[at] - new) ** 2
    return (batch.loss_weight[at] * (KL_COEF * kl - objective)).sum(), []


def _samples(aggregation: str) -> list[Sample]:
    """Rows of groups that share prompts, with this aggregation's weights in fp64; some ratios are clipped."""
    samples = random_groups(6, [9, 1, 30], [1, 12, 5, 40])
    for s in samples:
        s.old_logprobs = np.where(s.mask, s.old_logprobs - 2, np.nan).astype(np.float32)
    lengths = np.array([s.mask.sum() for s in samples], np.float64)
    for s, weight in zip(samples, AGGREGATIONS[aggregation](lengths, 40)):
        s.loss_weight = np.where(s.mask, weight, 0.0)
    return samples


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_loss_of_complete_rows_gives_the_unsharded_gradient(pool, aggregation: str):
    samples = _samples(aggregation)
    want = unsharded(tiny_qwen2(torch.float64), samples, _of_one_row)["grads"]
    rng = np.random.default_rng(len(aggregation))
    for world, micro in ((1, 1), (1, 3), (2, 2)):
        partition = random_partition(rng, len(samples), world, micro)
        args = (tiny_qwen2, {"dtype": torch.float64}, samples, partition, make_policy_loss(_cfg()), {})
        for rank in pool.run(partitioned, world, *args):
            distance, name = worst(rank["grads"], want)
            assert distance < 1e-10, f"{name} is {distance:.2e} of its norm off on {world} ranks"


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "ppo_clip"])
def test_a_built_in_loss_gives_the_gradient_of_rows_alone(pool, kind: str):
    """Groups with shared prompts in two micro-batches on two ranks, against the unsharded model and one row at a
    time."""
    samples, loss = _samples("seq_mean_token_mean"), make_policy_loss(AlgoConfig(loss=LossConfig(kind=kind)))
    want = unsharded(tiny_qwen2(torch.float64), samples, loss)["grads"]
    partition = random_partition(np.random.default_rng(len(kind)), len(samples), 2, 2)
    for rank in pool.run(partitioned, 2, tiny_qwen2, {"dtype": torch.float64}, samples, partition, loss, {}):
        distance, name = worst(rank["grads"], want)
        assert distance < 1e-10, f"{name} is {distance:.2e} of its norm off"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_truncated_answers_change_nothing(pool, aggregation: str):
    """algo.truncated=mask: neither their tokens nor their number count, and advantages stay the same; they still share
    the prompt with their group. Some micro-batches have only truncated answers."""
    samples, cfg = _samples(aggregation), _cfg(aggregation=aggregation, truncated="mask")
    for i, s in enumerate(samples):
        s.truncated = i % 3 == 1 or i > 9
    complete = [s for s, marked in zip(_samples(aggregation), samples) if not marked.truncated]
    assert assign_loss_weights(samples, cfg, 40) == assign_loss_weights(complete, _cfg(aggregation=aggregation), 40)
    want = unsharded(tiny_qwen2(torch.float64), complete, _of_one_row)["grads"]
    for partition in ([[list(range(10)), [10, 11]]], [[[0, 3, 10], [11]], [[1, 2, 4, 5], [6, 7, 8, 9]]]):
        world = len(partition)
        args = (tiny_qwen2, {"dtype": torch.float64}, samples, partition, make_policy_loss(cfg), {})
        for rank in pool.run(partitioned, world, *args):
            distance, name = worst(rank["grads"], want)
            assert distance < 1e-10, f"{name} is {distance:.2e} of its norm off on {world} ranks"


@pytest.mark.parametrize("truncated", ["train", "mask"])
def test_a_step_of_only_truncated_answers_gives_no_nan(pool, truncated: str):
    samples = _samples("token_mean")
    for s in samples:
        s.truncated = True
    num_trained = assign_loss_weights(samples, _cfg(truncated=truncated), 40)
    assert (num_trained == 0) == (truncated == "mask")
    partition = [[list(range(6)), list(range(6, 12))]]
    args = (tiny_qwen2, {"dtype": torch.float64}, samples, partition, make_policy_loss(_cfg()), {})
    (rank,) = pool.run(partitioned, 1, *args)
    assert all(np.isfinite(g).all() for g in rank["grads"].values())
    assert (rank["norm"] == 0) == (truncated == "mask")
    assert len(rank["logprobs"]) == 12, "sampled tokens are still scored again, for the sampler's proof"
