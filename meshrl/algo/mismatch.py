"""The differences between log-probabilities of sampler and trainer, for the behaviour proof of a weight sync (P15).

T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshrl.algo.kl import kl_estimate
from meshrl.core.types import Metric

SHORT_ROW_TOKENS = 32  # the mean of a shorter row is taken over this number: one unusual token is not a broken engine


def sampler_mismatch(
    rollout_logprobs: torch.Tensor, logprobs: torch.Tensor, mask: torch.Tensor, row_lengths: Sequence[int]
) -> list[Metric]:
    """Compare the sampler's logprobs with the trainer's, where mask is True.

    Four metrics in nats: mean and largest absolute difference, the largest mean of a row (one stale engine of many
    would hardly change the mean over all), and KL(sampler, trainer) by k3. A difference that is not a number counts as
    infinite, so that it is above any threshold.

    Shapes: all [T], rows of row_lengths one after the other. Without a trained token the means have weight 0 and the
    largest differences are 0.
    """
    sampled = rollout_logprobs[mask].double()
    difference = (logprobs[mask].double() - sampled).detach()
    kl = kl_estimate(sampled, sampled + difference, "k3")
    values = torch.stack([difference.abs(), kl]).nan_to_num(nan=math.inf, posinf=math.inf)
    count = values.shape[1]
    mean_sum, kl_sum = values.sum(dim=1).tolist()
    largest = float(values[0].max()) if count else 0.0
    counts = [int(row.sum()) for row in mask.split(list(row_lengths))]
    rows = [float(row.sum()) / max(n, SHORT_ROW_TOKENS) for n, row in zip(counts, values[0].split(counts), strict=True)]
    return [
        Metric(name="proof/logprob_abs_diff_mean", sum=mean_sum, weight=count, unit="nats"),
        Metric(name="proof/logprob_abs_diff_max", sum=largest, reduce="max", unit="nats"),
        Metric(name="proof/logprob_abs_diff_row", sum=max(rows, default=0.0), reduce="max", unit="nats"),
        Metric(name="proof/sampler_kl", sum=kl_sum, weight=count, unit="nats"),
    ]
