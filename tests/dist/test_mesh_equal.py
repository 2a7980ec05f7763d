"""The gradient does not depend on the mesh: every combination of its axes gives that of the unsharded model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import check, engine_over, norm_of, partitioned, random_partition, unsharded
from rank_pool import RankPool
from test_lora import with_adapters
from tiny_models import tiny_lm, tiny_qwen2
from tiny_samples import random_groups, random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig, CorrectionConfig, KlConfig
from meshrl.parallel.exchange import Axis, sum_gradients
from meshrl.parallel.fsdp import full_tensor

LENGTHS = [12, 3, 40, -6, 7, 7, 21, 2, 64, -2, 12, 13]
LOSS = AlgoConfig(entropy_coef=0.01, kl=KlConfig(coef=0.1, estimator="k3"))
OF_ROWS = make_policy_loss(LOSS.model_copy(update={"correction": CorrectionConfig(kind="truncate", level="sequence")}))


def mesh(dp_replicate: int = 1, dp_shard: int = 1, ulysses: int = 1, tp: int = 1) -> dict[str, Any]:
    axes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "ulysses": ulysses, "tp": tp}
    return {"sharding_strategy": "HYBRID_SHARD" if dp_replicate > 1 else "FULL_SHARD", "mesh": axes}


def size(train: dict[str, Any]) -> int:
    return int(np.prod([*train["mesh"].values()]))


MESHES = {
    "ulysses 2": mesh(ulysses=2),
    "tp 2": mesh(tp=2),
    "ulysses 4": mesh(ulysses=4),
    "tp 4": mesh(tp=4),
    "shard 2 x ulysses 2": mesh(dp_shard=2, ulysses=2),
    "shard 2 x tp 2": mesh(dp_shard=2, tp=2),
    "ulysses 2 x tp 2": mesh(ulysses=2, tp=2),
    "replicate 2 x ulysses 2": mesh(dp_replicate=2, ulysses=2),
    "replicate 2 x tp 2": mesh(dp_replicate=2, tp=2),
}


def data_ranks(train: dict[str, Any]) -> int:
    return int(train["mesh"]["dp_replicate"] * train["mesh"]["dp_shard"])


@pytest.mark.parametrize("train", MESHES.values(), ids=MESHES.keys())
def test_the_gradient_of_packed_rows_does_not_depend_on_the_mesh(pool: Any, train: dict[str, Any]):
    """Also with a dummy, with rows that train nothing, and with losses of complete rows, which cross the chunks of
    Ulysses."""
    samples = weigh(random_samples(1, LENGTHS)) + random_groups(6, [9, 1, 30], [1, 12, 5, 40])
    want = unsharded(tiny_qwen2(torch.float64), samples, OF_ROWS)
    partition = random_partition(np.random.default_rng(0), len(samples), data_ranks(train), 2)
    for micro_batches in partition:
        micro_batches.append([])
    args = (tiny_qwen2, {"dtype": torch.float64}, samples, partition, OF_ROWS, train)
    check(pool.run(partitioned, size(train), *args), want, torch.float64)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_axes_on_eight_ranks():
    samples = weigh(random_samples(1, LENGTHS)) + random_groups(6, [9, 1, 30], [1, 12, 5, 40])
    want = unsharded(tiny_qwen2(torch.float64), samples, OF_ROWS)
    train, partition = (
        mesh(dp_replicate=2, ulysses=2, tp=2),
        random_partition(np.random.default_rng(0), len(samples), 2, 2),
    )
    pool = RankPool(8, timeout_s=500)
    try:
        args = (tiny_qwen2, {"dtype": torch.float64}, samples, partition, OF_ROWS, train)
        check(pool.run(partitioned, 8, *args), want, torch.float64)
    finally:
        pool.close()


MODELS: dict[str, dict[str, Any]] = {  # what each has that others lack
    "untied head": {"family": "qwen2", "tie_word_embeddings": False},
    "words and features that tp does not divide": {"family": "llama", "vocab_size": 65, "intermediate_size": 45},
    "norms of heads": {"family": "qwen3"},
    "norms of all features of the queries": {"family": "olmo2"},
    "post-norms, softcaps, windows, scaled embedding": {"family": "gemma2"},
    "fused projections, one norm": {"family": "phi3"},
    "parallel attention, logit scale": {"family": "cohere"},
    "biases, layer norms": {"family": "starcoder2", "use_bias": True},
    "fused experts": {"family": "qwen3_moe"},
    "shared experts with a gate": {"family": "qwen2_moe"},
    "attention sinks, transposed experts": {"family": "gpt_oss"},
    "attention that counts the heads of the config": {"family": "stablelm"},
    "latent attention, shared experts": {"family": "deepseek_v3"},
}


@pytest.mark.parametrize("axes", ["shard 2 x tp 2", "ulysses 2 x tp 2"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_gradient_of_a_family_does_not_depend_on_the_mesh(pool: Any, model: dict[str, Any], axes: str):
    samples = weigh(random_samples(1, [12, 3, 20, -6, 7])) + random_groups(6, [9], [1, 12, 5])
    loss = make_policy_loss(LOSS)
    want, train = unsharded(tiny_lm(**model), samples, loss), MESHES[axes]
    partition = random_partition(np.random.default_rng(0), len(samples), data_ranks(train), 2)
    check(pool.run(partitioned, 4, tiny_lm, model, samples, partition, loss, train), want, torch.float32)


def test_adapters_have_the_same_gradient_on_a_mesh(pool: Any):
    samples = weigh(random_samples(1, [12, 3, 20, -6, 7])) + random_groups(6, [9], [1, 12, 5])
    loss = make_policy_loss(LOSS)
    want = unsharded(with_adapters(torch.float64), samples, loss)
    train = mesh(ulysses=2, tp=2)
    args = (with_adapters, {"dtype": torch.float64}, samples, [[[*range(len(samples))]]], loss, train)
    check(pool.run(partitioned, 4, *args), want, torch.float64)


def _curve(rank: int, world: int, train: dict[str, Any]) -> list[float]:
    """The norms of the gradient in 20 steps, each from the weights that the steps before have made."""
    engine = engine_over(tiny_lm("qwen3"), world, {**train, "optimizer": {"eps": 1e-3}})
    samples = weigh(random_samples(1, [12, 3, 20, 6])) + random_groups(6, [9], [1, 12, 5])
    rows = list(range(len(samples)))[engine.coordinates.data_index :: engine.coordinates.num_data]
    batches = [engine.pack([samples[i] for i in rows], rows)]
    norms = []
    for _ in range(20):
        engine.forward_backward(batches, make_policy_loss(LOSS))
        norms.append(engine.optim_step(1e-3).grad_norm)
    return norms


@pytest.mark.slow
def test_twenty_steps_are_the_same_on_every_mesh(pool: Any):
    (want,) = pool.run(_curve, 1, mesh())
    assert want[-1] < 0.9 * want[0]
    kept = {**mesh(dp_shard=2, tp=2), "sharding_strategy": "SHARD_GRAD_OP"}
    for train in (mesh(dp_shard=2, tp=2), kept, mesh(ulysses=2, tp=2)):
        for norms in pool.run(_curve, 4, train):
            assert norms == pytest.approx(want, rel=1e-5)


def _summed(rank: int, world: int) -> bool:
    parts = torch.randn(world, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.zeros(512, dtype=torch.bfloat16, requires_grad=True)
    sum_gradients([weight], Axis(world, rank, None))[0].backward(parts[rank])
    assert weight.grad is not None
    return torch.equal(weight.grad, parts.float().sum(0).bfloat16())


def test_parts_of_a_bf16_gradient_are_rounded_once(pool: Any):
    """A sum in bf16 rounds after each of its ranks, so the gradients of norms get worse with their number."""
    assert pool.run(_summed, 4) == [True] * 4


def _distances_in_bf16(rank: int, world: int, train: dict[str, Any], samples: list[Any], want: list[Any]) -> float:
    """Of the gradients of several models to those in fp32, relative to their norms."""
    squares = 0.0
    for seed, grads in enumerate(want):
        engine = engine_over(tiny_lm("qwen3", seed=seed), world, train, torch.bfloat16)
        engine.forward_backward([engine.pack(samples, range(len(samples)))], make_policy_loss(LOSS))
        got = {n: full_tensor(p.grad).numpy() for n, p in engine.model.lm.named_parameters()}
        squares += (norm_of({n: got[n] - grads[n] for n in grads}) / norm_of(grads)) ** 2
    return squares**0.5


def test_bf16_under_tp_is_as_near_to_fp32_as_on_one_rank(pool: Any):
    samples = weigh(random_samples(1, [12, 3, 20, -6, 7])) + random_groups(6, [9], [1, 12, 5])
    want = [unsharded(tiny_lm("qwen3", seed=seed), samples, make_policy_loss(LOSS))["grads"] for seed in range(4)]
    (one,), tp = (pool.run(_distances_in_bf16, size(train), train, samples, want) for train in (mesh(), mesh(tp=2)))
    assert 0 < tp[0] < 1.25 * one and tp[0] == tp[1]
