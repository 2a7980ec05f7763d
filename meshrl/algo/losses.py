"""Loss functions of the train engine: (Outputs, Batch) -> (sum over tokens of loss_weight * loss, metrics).

T packed tokens. Every loss here is an instance of a module-level class, so that it can be sent to a rank process.
Positions outside the mask hold garbage, NaN included. They are replaced before any arithmetic (`_trained`), not
multiplied away afterwards: 0 * NaN is NaN, and so is the gradient of a `where` around a NaN (P5).

Metrics are sums over trained tokens with their weight, never means. What enters the loss (loss/policy, loss/kl) is
weighted by loss_weight, as the gradient is; everything else counts each trained token once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshrl.algo.kl import MAX_LOG_RATIO, kl_estimate
from meshrl.config.algo import AlgoConfig
from meshrl.core.batch import Batch, LossFn, Outputs
from meshrl.core.types import Metric, Reduce


def make_policy_loss(cfg: AlgoConfig) -> LossFn:
    """The policy loss that the config names, with its KL and entropy terms."""
    return LOSSES[cfg.loss.kind](cfg)


def sft_loss() -> LossFn:
    """Negative log-likelihood of the trained tokens, weighted by loss_weight alone."""
    return NllLoss()


@dataclass(frozen=True, slots=True)
class PpoClipLoss:
    """PPO's clipped surrogate, with asymmetric bounds, optional dual clip, KL in the loss and entropy bonus.

    With r = exp(logprobs - old_logprobs) and advantage A, a token's loss is
    `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`, for A < 0 at most `-A dual_clip`; then
    `+ kl.coef * KL(policy, reference)` when kl.place is loss, `- entropy_coef * entropy`.

    old_logprobs None means a single on-policy update: r is exactly 1, carries the gradient, and nothing is clipped
    (P7). The log-ratio is cut to [-20, 20]; a token out there has long lost its meaning and gives no gradient.

    Raises: ValueError when the batch or the outputs lack what the config asks for.
    Source: Schulman et al. 2017 (PPO) equation 7; Yu et al. 2025 (DAPO) equation 10 for the asymmetric bounds;
    Ye et al. 2020 equation 4 for dual clip.
    """

    cfg: AlgoConfig

    def __call__(self, outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, list[Metric]]:
        cfg, mask = self.cfg, batch.mask
        if batch.advantages is None:
            raise ValueError("the policy loss needs batch.advantages; assign_advantages must run before packing")
        new = _trained(outputs.logprobs, mask)
        old = new.detach() if batch.old_logprobs is None else _trained(batch.old_logprobs, mask)
        weight = _trained(batch.loss_weight, mask)
        policy, seen = self._surrogate(new, old, _trained(batch.advantages, mask), mask)
        terms = {"loss/policy": policy}
        loss = policy
        if cfg.kl.coef > 0 and cfg.kl.place == "loss":
            if batch.ref_logprobs is None:
                raise ValueError(f"algo.kl.coef is {cfg.kl.coef}, but the batch has no ref_logprobs")
            terms["loss/kl"] = kl_estimate(new, _trained(batch.ref_logprobs, mask), cfg.kl.estimator)
            loss = loss + cfg.kl.coef * terms["loss/kl"]
        if outputs.entropy is not None:
            seen["loss/entropy"] = _trained(outputs.entropy, mask)
        if cfg.entropy_coef != 0:
            if outputs.entropy is None:
                raise ValueError(f"algo.entropy_coef is {cfg.entropy_coef}, but the outputs have no entropy")
            loss = loss - cfg.entropy_coef * seen["loss/entropy"]
        return (weight * loss).sum(), _sums(terms, weight) + _sums(seen, mask)

    def _surrogate(
        self, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The clipped loss of each token, and what to measure about it; all [T] and 0 outside the mask."""
        cfg = self.cfg.loss
        ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        low, high = 1.0 - cfg.clip_low, 1.0 + cfg.clip_high
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
        seen = {
            "loss/clip_fraction_low": (ratio < low) & (advantages < 0),
            "loss/clip_fraction_high": (ratio > high) & (advantages > 0),
        }
        if cfg.dual_clip is not None:
            bound = -advantages * cfg.dual_clip
            seen["loss/clip_fraction_dual"] = (loss > bound) & (advantages < 0)
            loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        trained_ratio = _trained(ratio, mask)
        seen |= {
            "loss/ratio_mean": trained_ratio,
            "loss/ratio_max": trained_ratio,
            "loss/approx_kl": kl_estimate(old, new, "k3"),
        }
        return loss, seen


@dataclass(frozen=True, slots=True)
class NllLoss:
    """Negative log-likelihood of the tokens themselves; looks at loss_weight, never at advantages."""

    def __call__(self, outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, list[Metric]]:
        nll = -_trained(outputs.logprobs, batch.mask)
        weight = _trained(batch.loss_weight, batch.mask)
        return (weight * nll).sum(), _sums({"loss/nll": nll}, batch.mask)


def _trained(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """values where the mask is True, an exact 0 with an exact zero gradient elsewhere."""
    return torch.where(mask, values, torch.zeros_like(values))


def _sums(values: dict[str, torch.Tensor], weight: torch.Tensor) -> list[Metric]:
    """One metric for each [T] tensor: sum(weight * value) with weight sum(weight), or the maximum; one copy to host."""
    weight = weight.double()
    sums = [
        value.max() if _METRICS[name][0] == "max" else (weight * value.detach()).sum() for name, value in values.items()
    ]
    *numbers, total = torch.stack([s.detach().double() for s in [*sums, weight.sum()]]).tolist()
    return [
        Metric(name=name, sum=number, weight=1.0 if reduce == "max" else total, reduce=reduce, unit=unit)
        for name, number in zip(values, numbers)
        for reduce, unit in [_METRICS[name]]
    ]


_METRICS: dict[str, tuple[Reduce, str]] = {
    "loss/policy": ("mean", ""),
    "loss/kl": ("mean", "nats"),
    "loss/nll": ("mean", "nats"),
    "loss/entropy": ("mean", "nats"),
    "loss/approx_kl": ("mean", "nats"),
    "loss/clip_fraction_low": ("mean", "fraction"),
    "loss/clip_fraction_high": ("mean", "fraction"),
    "loss/clip_fraction_dual": ("mean", "fraction"),
    "loss/ratio_mean": ("mean", ""),
    "loss/ratio_max": ("max", ""),  # ratios are positive, so the 0 of masked tokens is neutral
}

LOSSES: dict[str, Callable[[AlgoConfig], LossFn]] = {"ppo_clip": PpoClipLoss}
"""algo.loss.kind -> what makes its LossFn from the algorithm's config."""
