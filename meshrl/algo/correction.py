"""The importance correction between sampler and trainer: weights of the policy loss, and metrics of the difference.

N trained tokens. Three logprobs of a token meet in a loss: of the sampler (rollout), of the policy at the start of the
step (old), and of the policy that is trained (new). The loss clips new / old; this file corrects old / rollout:

    w = exp(old_logprobs - rollout_logprobs)

so that the product of both is new / rollout, the ratio to the distribution that the tokens come from. The engine
multiplies the policy term of any loss, built-in or user-defined, by the weight of each token; the KL and entropy terms
are not weighted. A weight of 0 leaves the denominators unchanged, and no weight has a gradient.

Source: Hilton et al. 2022, "Batch size-invariance for policy optimization", for the decoupled ratios; Ionides 2008,
"Truncated Importance Sampling".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from meshrl.algo.kl import MAX_LOG_RATIO, kl_estimate
from meshrl.config.algo import CorrectionConfig, RejectionConfig
from meshrl.core.device import fetched
from meshrl.core.types import Metric

if TYPE_CHECKING:
    from meshrl.algo.losses import LossInputs


def correct(cfg: CorrectionConfig, inputs: LossInputs) -> tuple[torch.Tensor | None, Iterator[Metric]]:
    """The weight of each token's policy loss, float64[N] without gradient, and the metrics of the correction. The
    weight is None if nothing is corrected; the metrics are the same for any cfg, except for the fractions, and their
    iterator waits for the device.

    A token whose logprobs have no finite difference, because an engine reported NaN or -inf, has no ratio: it gets
    weight 0, as does its row where a row has one ratio or measure. Such tokens are counted, and are in no mean of
    ratios. Without a correction they are only counted.

    With equal logprobs w is exactly 1, and the loss is that of `off` to the bit.
    """
    log_ratio = inputs.old_logprobs.detach().double() - inputs.rollout_logprobs.double()
    log_ratio = log_ratio.where(log_ratio.isfinite(), torch.nan)
    ratio = _exp(log_ratio if cfg.level == "token" else inputs.row_sum(log_ratio))
    outside = (ratio > cfg.high) | (ratio < (cfg.low or 0.0))
    kind = cfg.kind_on(log_ratio.device.type)
    if kind == "truncate":
        weight = ratio.clamp(cfg.low, cfg.high)
    elif kind == "mask":
        weight = ratio.masked_fill(outside, 0.0)
    else:
        weight = torch.ones_like(ratio)
    corrects = kind != "off"
    if cfg.rejection.measure != "off":
        weight, corrects = weight.masked_fill(_rejected(cfg.rejection, inputs, log_ratio), 0.0), True
    weight = weight.nan_to_num(nan=0.0)
    return weight if corrects else None, _metrics(len(weight), _sums(log_ratio, outside, weight))


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _rejected(cfg: RejectionConfig, inputs: LossInputs, log_ratio: torch.Tensor) -> torch.Tensor:
    """bool[N]: the tokens whose measure, or whose row's measure, is outside the bounds or not a number."""
    measure = kl_estimate(torch.zeros_like(log_ratio), log_ratio, cfg.measure)
    if cfg.level == "seq_mean":
        measure = inputs.row_mean(measure)
    elif cfg.level == "seq_max":
        measure = torch.cat([row.max().expand(len(row)) for row in measure.split(inputs.row_lengths)])
    inside = ~measure.isnan()
    if cfg.low is not None:
        inside &= measure >= cfg.low
    if cfg.high is not None:
        inside &= measure <= cfg.high
    return ~inside


def _sums(log_ratio: torch.Tensor, outside: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Ratios of single tokens at any level, before they are cut. All numbers are copied to the host at once."""
    has_ratio = ~log_ratio.isnan()
    ratio = _exp(log_ratio)
    numbers = [
        has_ratio.sum(),
        ratio.nansum(),
        (ratio.square() - 1).nansum(),
        log_ratio.nansum(),
        log_ratio.nan_to_num(nan=torch.inf).min(),
        log_ratio.nan_to_num(nan=-torch.inf).max(),
        outside.sum(),
        (weight == 0).sum(),
    ]
    return fetched(torch.stack([n.double() for n in numbers]))


def _metrics(num_tokens: int, read: Callable[[], torch.Tensor]) -> Iterator[Metric]:
    """read: returns the numbers of `_sums`."""
    count, mean, chi_square, log_mean, low, high, clipped, rejected = read().tolist()
    yield from [
        Metric(name="correction/weight_mean", sum=mean, weight=count),
        Metric(name="correction/chi_square", sum=chi_square, weight=count),
        Metric(name="correction/log_ratio_mean", sum=log_mean, weight=count, unit="nats"),
        Metric(name="correction/clipped_fraction", sum=clipped, weight=num_tokens, unit="fraction"),
        Metric(name="correction/rejected_fraction", sum=rejected, weight=num_tokens, unit="fraction"),
        Metric(name="correction/tokens_without_ratio", sum=num_tokens - count, reduce="sum", unit="tokens"),
    ]
    if count:
        yield from [
            Metric(name="correction/log_ratio_min", sum=low, reduce="min", unit="nats"),
            Metric(name="correction/log_ratio_max", sum=high, reduce="max", unit="nats"),
        ]


def correction_summary(metrics: Iterable[Metric]) -> list[Metric]:
    """The effective sample size, (sum w)^2 / (N sum w^2), as a fraction of the N tokens; [] without tokens. It is not
    a sum over tokens, so it needs the metrics of all ranks and micro-batches of the step.

    Source: Kong 1992; it equals mean(w)^2 / (1 + chi_square).
    """
    total = squares = count = 0.0
    for metric in metrics:
        if metric.name == "correction/weight_mean":
            total, count = total + metric.sum, count + metric.weight
        elif metric.name == "correction/chi_square":
            squares += metric.sum + metric.weight
    if not count:
        return []
    return [Metric(name="correction/effective_sample_size", sum=total * total, weight=count * squares, unit="fraction")]
