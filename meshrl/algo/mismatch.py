"""The differences between log-probabilities of sampler and trainer, for the behaviour proof of a weight sync."""

from __future__ import annotations

import math

import numpy as np
import torch

from meshrl.algo.kl import kl_estimate
from meshrl.core.types import Metric, Sample

SHORT_ROW_TOKENS = 32  # the mean of a shorter row is taken over this number: one unusual token is not a broken engine
COLUMNS = ("trained", "checked", "abs_sum", "abs_max", "kl_sum")
"""Of a row: the number of trained tokens, the number of those that are compared, and, in nats, the sum and the maximum
of their absolute differences and the sum of KL(sampler, trainer) by k3."""


def row_mismatch(sample: Sample, logprobs: np.ndarray, version: int) -> np.ndarray:
    """Compare the sampler's logprobs of one row with the trainer's of this weight version. float64[5]: COLUMNS.

    Only tokens that were sampled with the same version are compared: older ones differ because the weights do. A
    difference that is not a number counts as infinite, so that it is above any threshold.
    """
    checked = sample.mask & (sample.versions == version)
    sampled = torch.from_numpy(sample.rollout_logprobs[checked]).double()
    difference = torch.from_numpy(logprobs[checked]).double() - sampled
    kl = kl_estimate(sampled, sampled + difference, "k3")
    gap, kl = torch.stack([difference.abs(), kl]).nan_to_num(nan=math.inf, posinf=math.inf)
    largest = float(gap.max()) if len(gap) else 0.0
    return np.array([sample.mask.sum(), len(gap), float(gap.sum()), largest, float(kl.sum())])


def row_means(rows: np.ndarray) -> np.ndarray:
    """The mean absolute difference of each row: the sum divided by the number of compared tokens, but by at least
    SHORT_ROW_TOKENS. [n, 5] -> [n]."""
    return rows[:, 2] / np.maximum(rows[:, 1], SHORT_ROW_TOKENS)


def mismatch_metrics(rows: np.ndarray) -> list[Metric]:
    """The metrics of n rows, at least one. rows: [n, 5], COLUMNS."""
    trained, checked, total, _, kl = rows.sum(axis=0).tolist()
    return [
        Metric(name="proof/logprob_abs_diff_mean", sum=total, weight=checked, unit="nats"),
        Metric(name="proof/logprob_abs_diff_max", sum=float(rows[:, 3].max()), reduce="max", unit="nats"),
        Metric(name="proof/logprob_abs_diff_row", sum=float(row_means(rows).max()), reduce="max", unit="nats"),
        Metric(name="proof/sampler_kl", sum=kl, weight=checked, unit="nats"),
        Metric(name="proof/checked_fraction", sum=checked, weight=trained, unit="fraction"),
    ]
