"""Rows whose loss has no gradient get no backward pass; the gradient, the metrics and the logprobs stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import partitioned, unsharded, worst
from own_algorithms import gspo  # noqa: F401 - the loss named below
from tiny_models import tiny_qwen2
from tiny_samples import random_groups

from meshrl.algo.losses import make_policy_loss, rows_without_gradient
from meshrl.config.algo import AlgoConfig, KlConfig, UserLossConfig
from meshrl.core.batch import Batch, Outputs
from meshrl.core.types import Metric, Sample
from meshrl.monitor.metrics import divide, merge
from meshrl.train.batch_plan import make_batch_plan

LOSS = make_policy_loss(AlgoConfig())


def _samples(without: set[int]) -> list[Sample]:
    """12 rows in 3 groups that share prompts; those in `without` have no advantage."""
    samples = random_groups(6, [9, 1, 30], [1, 12, 5, 40])
    for i, s in enumerate(samples):
        assert s.advantages is not None and s.advantages[s.mask].all()
        s.loss_weight = np.where(s.mask, 0.01, 0.0)
        if i in without:
            s.advantages = np.zeros_like(s.advantages)
    return samples


def _counting(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, list[Metric]]:
    """The loss, and the tokens of the batches that have a graph."""
    loss, metrics = LOSS(outputs, batch)
    in_graph = float(outputs.logprobs.requires_grad) * int(batch.mask.sum())
    return loss, [*metrics, Metric(name="in_graph", sum=in_graph, reduce="sum")]


@pytest.mark.parametrize("without", [{0, 1, 2, 3, 6}, {11}, set(range(12))], ids=["some", "one", "all"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_they_are_scored_only_and_nothing_else_changes(pool, strategy: str, without: set[int]):
    samples = _samples(without)
    assert rows_without_gradient(AlgoConfig(), samples) == without
    want = unsharded(tiny_qwen2(torch.float64), samples, LOSS)
    of_all = divide(merge(want["metrics"]))
    groups, prefixes = [i // 4 for i in range(12)], [s.prefix_len for s in samples]
    for world in (1, 2, 4):
        plan = make_batch_plan([len(s) for s in samples], world, 60, groups, prefixes, without)
        partition = [[list(micro) for micro in micros] for micros in plan.micro_batches]
        train: dict[str, Any] = {"sharding_strategy": strategy, "activation_checkpointing": world == 2}
        args = (tiny_qwen2, {"dtype": torch.float64}, samples, partition, _counting, train, plan.num_scored)
        ranks = pool.run(partitioned, world, *args)
        metrics = divide(merge([m for rank in ranks for m in rank["metrics"]]))
        trained = sum(int(s.mask.sum()) for i, s in enumerate(samples) if i not in without)
        assert metrics.pop("in_graph", 0.0) == trained
        assert metrics == pytest.approx(of_all, rel=1e-9, abs=1e-12)
        logprobs = {i: row for rank in ranks for i, row in rank["logprobs"].items()}
        assert sorted(logprobs) == list(range(12))
        for i, row in logprobs.items():
            np.testing.assert_allclose(row, want["logprobs"][i], atol=1e-6)
        for rank in ranks:
            if len(without) == 12:  # zeros, not None: the optimizer's moments still move the weights
                assert all(not grad.any() for grad in rank["grads"].values())
            else:
                distance, name = worst(rank["grads"], want["grads"])
                assert distance < 1e-10, f"{name} is {distance:.2e} of its norm off on {world} ranks"


@pytest.mark.parametrize("world", [1, 2])
def test_rows_that_are_not_scored_change_no_bit_of_the_gradient(pool, world: int):
    samples, without = _samples({0, 1, 2, 3, 6, 11}), {0, 1, 2, 3, 6, 11}
    groups, prefixes = [i // 4 for i in range(12)], [s.prefix_len for s in samples]
    of_plans = []
    for scored in (without, {2}):
        plan = make_batch_plan([len(s) for s in samples], world, 60, groups, prefixes, scored, without - scored)
        partition = [[list(micro) for micro in micros] for micros in plan.micro_batches]
        args = (tiny_qwen2, {"dtype": torch.float32}, samples, partition, LOSS, {}, plan.num_scored)
        of_plans.append(pool.run(partitioned, world, *args))
    for rank_of_all, rank in zip(*of_plans, strict=True):
        for name, grad in rank["grads"].items():
            np.testing.assert_array_equal(grad, rank_of_all["grads"][name])
    assert sorted(i for rank in of_plans[1] for i in rank["logprobs"]) == [2, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("cfg", "is_trained"),
    [
        (AlgoConfig(), False),
        (AlgoConfig(kl=KlConfig(coef=0.1, place="reward")), False),
        (AlgoConfig(kl=KlConfig(coef=0.1, place="loss")), True),
        (AlgoConfig(entropy_coef=0.01), True),
        (AlgoConfig(loss=UserLossConfig(kind="own_algorithms:gspo")), True),
    ],
    ids=["plain", "KL in the reward", "KL in the loss", "entropy bonus", "own loss"],
)
def test_an_advantage_of_zero_is_enough_only_where_nothing_else_is_in_the_loss(cfg: AlgoConfig, is_trained: bool):
    samples = _samples({2})
    samples[5].loss_weight = np.zeros_like(samples[5].loss_weight)  # masked, as cut off: never trained
    assert rows_without_gradient(cfg, samples) == ({5} if is_trained else {2, 5})


def test_scored_rows_lead_each_rank_in_equally_many_micro_batches():
    lengths, scored = [30, 20, 50, 10, 40, 60, 25], {1, 3, 5}
    plan = make_batch_plan(lengths, 2, 64, scored=scored)
    assert plan.num_scored >= 1 and len({len(micros) for micros in plan.micro_batches}) == 1
    leading = [i for micros in plan.micro_batches for micro in micros[: plan.num_scored] for i in micro]
    assert sorted(leading) == sorted(scored)
    assert sorted(i for rank in (0, 1) for i in plan.rows(rank)) == list(range(7))
    few = make_batch_plan(lengths, 2, 64, scored={3}, unscored={1, 5})
    assert sorted(i for rank in (0, 1) for i in few.rows(rank)) == [0, 2, 3, 4, 6] and few.unscored == {1, 5}
    of_trained = [[micros[p.num_scored :] for micros in p.micro_batches] for p in (few, plan)]
    assert of_trained[0] == of_trained[1]
    everything = make_batch_plan(lengths, 2, 64, scored=range(7))
    assert [micros[everything.num_scored :] for micros in everything.micro_batches] == [((),), ((),)]  # dummies
