"""The engine's gradient equals the unsharded model's for any partition of the same samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import check, partitioned, random_partition, unsharded
from tiny_models import tiny_qwen2
from tiny_samples import random_groups, random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig, KlConfig

LENGTHS = [12, 3, 40, -6, 7, 7, 21, 2, 64, -2, 12, 12]
LOSS = AlgoConfig(entropy_coef=0.01, kl=KlConfig(coef=0.1, estimator="k3"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_gradient_does_not_depend_on_ranks_micro_batches_or_packs(pool, world, dtype):
    """Random partitions, also with fully masked rows and empty (dummy) micro-batches."""
    samples = weigh(random_samples(1, LENGTHS))
    loss = make_policy_loss(LOSS)
    want = unsharded(tiny_qwen2(dtype), samples, loss)
    rng = np.random.default_rng(world)
    for micro in (1, 3):
        partition = random_partition(rng, len(samples), world, micro)
        args = (tiny_qwen2, {"dtype": dtype}, samples, partition, loss, {"activation_checkpointing": micro == 3})
        check(pool.run(partitioned, world, *args), want, dtype)


@pytest.mark.parametrize(
    "train",
    [
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD", "mesh": {"dp_replicate": 2, "dp_shard": 2}},
        {"logprob_chunk_tokens": 5},
    ],
    ids=lambda t: str(next(iter(t.values()))),
)
def test_every_sharding_strategy_gives_the_same_gradient(pool, train):
    samples = weigh(random_samples(2, LENGTHS))
    loss = make_policy_loss(LOSS)
    want = unsharded(tiny_qwen2(torch.float64), samples, loss)
    partition = random_partition(np.random.default_rng(0), len(samples), 4, 2)
    got = pool.run(partitioned, 4, tiny_qwen2, {"dtype": torch.float64}, samples, partition, loss, train)
    check(got, want, torch.float64)
    full_numel = sum(p.numel() for p in tiny_qwen2().parameters())
    shards = {"NO_SHARD": 1, "HYBRID_SHARD": 2}.get(train.get("sharding_strategy", ""), 4)
    assert max(r["local_numel"] for r in got) < 1.3 * full_numel / shards


def test_untied_heads_and_ranks_without_any_row(pool):
    samples = weigh(random_samples(3, [9, 5]))
    loss = make_policy_loss(LOSS)
    want = unsharded(tiny_qwen2(torch.float64, tie=False), samples, loss)
    partition = [[[]], [[0, 1]], [[]], [[]]]
    model = {"dtype": torch.float64, "tie": False}
    check(pool.run(partitioned, 4, tiny_qwen2, model, samples, partition, loss, {}), want, torch.float64)


@pytest.mark.parametrize("poison", [float("nan"), 1e6, float("inf")])
def test_masked_positions_are_never_read(pool, poison):
    """Poison at every masked position of every array changes no bit of the result."""
    clean = weigh(random_samples(4, LENGTHS))
    poisoned = weigh(random_samples(4, LENGTHS))
    for s in poisoned:
        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"):
            array = getattr(s, name).copy()
            array[~s.mask] = poison
            setattr(s, name, array)
    partition = random_partition(np.random.default_rng(5), len(clean), 2, 2)
    loss = make_policy_loss(LOSS)
    results = [pool.run(partitioned, 2, tiny_qwen2, {}, samples, partition, loss, {}) for samples in (clean, poisoned)]
    for a, b in zip(*results, strict=True):
        assert all(np.array_equal(a["grads"][n], b["grads"][n]) for n in a["grads"])
        assert a["metrics"] == b["metrics"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_group_that_shares_its_prompt_gives_the_same_gradient(pool, world, dtype):
    """The prompt is computed once, every answer sees it, and its gradient is the sum over the answers, for any part of
    a group in a micro-batch, also a single row."""
    samples = random_groups(6, [9, 1, 30], [1, 12, 5, 40])
    loss = make_policy_loss(LOSS)
    want = unsharded(tiny_qwen2(dtype), samples, loss)
    rng = np.random.default_rng(world)
    for micro in (1, 3):
        partition = random_partition(rng, len(samples), world, micro)
        args = (tiny_qwen2, {"dtype": dtype}, samples, partition, loss, {"activation_checkpointing": micro == 3})
        check(pool.run(partitioned, world, *args), want, dtype)
