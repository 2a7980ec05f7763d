"""The importance correction gives the unsharded model's gradient and the same metrics for any partition: a
product or mean over rows that a micro-batch shares would depend on packing and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import partitioned, random_partition, unsharded, worst
from tiny_models import tiny_qwen2
from tiny_samples import random_groups

from meshrl.algo.correction import correction_summary
from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig, CorrectionConfig, KlConfig, RejectionConfig
from meshrl.core.batch import Batch, Outputs
from meshrl.core.types import Metric, Sample
from meshrl.monitor.metrics import divide, merge

CLIP, KL_COEF, LOW, HIGH, LARGEST_K2 = 0.2, 0.1, 0.5, 1.5, 0.06
LOSS = AlgoConfig(
    kl=KlConfig(coef=KL_COEF, estimator="k2"),
    correction=CorrectionConfig(
        kind="mask",
        level="sequence",
        low=LOW,
        high=HIGH,
        rejection=RejectionConfig(measure="k2", level="seq_max", high=LARGEST_K2),
    ),
)


def _of_one_row(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, list[Metric]]:
    """Decoupled PPO on a batch of one row, written without meshrl.algo."""
    at = batch.mask
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None and batch.advantages is not None
    new, old, rollout = outputs.logprobs[at], batch.old_logprobs[at].double(), batch.rollout_logprobs[at].double()
    w = float(torch.exp((old - rollout).sum()))
    if not LOW <= w <= HIGH or float(((old - rollout) ** 2 / 2).max()) > LARGEST_K2:
        w = 0.0
    ratio, advantages = torch.exp(new - old), batch.advantages[at].double()
    objective = torch.minimum(ratio * advantages, torch.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    kl = 0.5 * (batch.ref_logprobs[at] - new) ** 2
    return (batch.loss_weight[at] * (KL_COEF * kl - w * objective)).sum(), []


def _samples() -> list[Sample]:
    """Some rows are masked by their product, some by their largest token, and most are trained."""
    samples = random_groups(6, [9, 1, 30], [1, 12, 5, 40])
    rng = np.random.default_rng(5)
    for s in samples:
        s.rollout_logprobs = (s.old_logprobs + 0.15 * rng.standard_normal(len(s))).astype(np.float32)
    return samples


def test_the_samples_have_trained_masked_and_rejected_rows():
    gaps = [(s.old_logprobs - s.rollout_logprobs)[s.mask].astype(np.float64) for s in _samples()]
    masked = np.array([not LOW <= np.exp(gap.sum()) <= HIGH for gap in gaps])
    rejected = np.array([(gap**2 / 2).max() > LARGEST_K2 for gap in gaps])
    counts = (masked & ~rejected).sum(), (rejected & ~masked).sum(), (~masked & ~rejected).sum()
    assert all(count >= 2 for count in counts), counts


def test_a_correction_of_rows_gives_the_unsharded_gradient_and_metrics(pool):
    samples = _samples()
    want = unsharded(tiny_qwen2(torch.float64), samples, _of_one_row)["grads"]
    rng = np.random.default_rng(4)
    seen = []
    for world, micro in ((1, 1), (1, 3), (2, 2)):
        partition = random_partition(rng, len(samples), world, micro)
        args = (tiny_qwen2, {"dtype": torch.float64}, samples, partition, make_policy_loss(LOSS), {})
        ranks = pool.run(partitioned, world, *args)
        for rank in ranks:
            distance, name = worst(rank["grads"], want)
            assert distance < 1e-10, f"{name} is {distance:.2e} of its norm off on {world} ranks"
        metrics = [m for rank in ranks for m in rank["metrics"]]
        metrics += correction_summary(metrics)
        seen.append({n: v for n, v in divide(merge(metrics)).items() if n.startswith("correction/")})
    assert 0 < seen[0]["correction/rejected_fraction"] < 1 and 0 < seen[0]["correction/effective_sample_size"] < 1
    assert all(values == pytest.approx(seen[0], rel=1e-12) for values in seen)
