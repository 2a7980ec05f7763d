"""Policy losses, as functions of the trained tokens of one micro-batch, and the loss functions of the train engine:
(Outputs, Batch) -> (sum over tokens of loss_weight * loss, metrics).

T packed tokens, N of them trained. A policy loss, built-in or user-defined (docs/add_an_algorithm.md), is

    f(inputs: LossInputs, **its keys of algo.loss) -> (loss of each token [N], {metric: its value at each token [N]})

It gets trained tokens only, so that no mask can be forgotten: other positions of a batch, which may be NaN, are never
read. It returns one number for each token and no mean, so that only the engine divides.

Metrics are sums over trained tokens with their weight, never means. Terms of the loss (loss/policy, loss/kl) are
weighted by loss_weight, as in the gradient; all other metrics count each trained token once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from meshrl.algo.correction import correct
from meshrl.algo.kl import MAX_LOG_RATIO, kl_estimate
from meshrl.config.algo import AlgoConfig, LossConfig
from meshrl.core.batch import Batch, LossFn, Outputs
from meshrl.core.columns import columns_for, values_of
from meshrl.core.device import fetched
from meshrl.core.lookup import look_up
from meshrl.core.types import Metric, Reduce, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """The trained tokens of one micro-batch, row after row. All tensors are [N], with N >= 1.

    logprobs and entropy have a gradient. old_logprobs are from the policy at the start of the step; in a single
    on-policy update they are the values of logprobs, so that the ratio is exactly 1. rollout_logprobs are from the
    sampler; algo.correction uses them, so a loss need not. ref_logprobs is None unless algo.kl.coef is above 0.

    row_lengths: the number of trained tokens of each row, in order. A row is one sequence: the complete answer of a
    single-turn trajectory, or all trained tokens of one branch of a longer one. It is never split over micro-batches.
    columns: those of core/columns.py that are read by `loss` and have no field here.

    Example, rows of 2 and 3 trained tokens: row_lengths [2, 3], and row_mean([1, 3, 0, 0, 6]) is [2, 2, 2, 2, 2].
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    ref_logprobs: torch.Tensor | None
    entropy: torch.Tensor | None
    row_lengths: list[int]
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    def row_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the trained tokens of each row, at each of these tokens. [N] -> [N]."""
        return torch.cat([row.sum().expand(len(row)) for row in values.split(self.row_lengths)])

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the trained tokens of each row, at each of these tokens. [N] -> [N]."""
        return torch.cat([row.mean().expand(len(row)) for row in values.split(self.row_lengths)])


_COLUMN_FIELDS = tuple(field.name for field in fields(LossInputs) if field.name not in ("row_lengths", "columns"))
PolicyLossFn = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def ppo_clip(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate, with asymmetric bounds and optional dual clip.

    With r = exp(logprobs - old_logprobs) and advantage A, a token's loss is
    `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`, for A < 0 at most `-A dual_clip`. The log-ratio is clamped to
    [-20, 20]; a token outside gives no gradient.

    Source: Schulman et al. 2017 (PPO) equation 7; Yu et al. 2025 (DAPO) equation 10 for the asymmetric bounds;
    Ye et al. 2020 equation 4 for dual clip.
    """
    advantages = inputs.advantages
    loss, seen = _clipped_surrogate(inputs, _ratio(inputs.logprobs - inputs.old_logprobs), clip_low, clip_high)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        seen["clip_fraction_dual"] = (loss > bound) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, seen


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate with one ratio s for each row: the geometric mean of the ratios of its tokens.

    s = exp(row mean of (logprobs - old_logprobs)) at each token, where it has the gradient s of the token's own
    log-probability. With aggregation seq_mean_token_mean, one advantage for each row, and algo.correction off or at
    level sequence, value and gradient are those of the sequence's objective.

    Source: Zheng et al. 2025 (GSPO) equations 5 to 7; equation 14 for the gradient of each token.
    """
    log_ratio = inputs.row_mean(inputs.logprobs - inputs.old_logprobs).detach()
    own = (inputs.logprobs - inputs.logprobs.detach()).nan_to_num()  # 0, with a gradient of 1 where it is finite
    return _clipped_surrogate(inputs, _ratio(log_ratio + own), clip_low, clip_high)


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The log-probability times the clipped ratio: `-A clip(r, 1 - clip_low, 1 + clip_high) logprobs`. The ratio has no
    gradient, so that a token outside the bounds has one, too, of limited size.

    Source: MiniMax 2025 (MiniMax-M1) equations 4 and 5; Khatri et al. 2025 (ScaleRL) for the bounds [0, 5].
    """
    ratio = _ratio(inputs.logprobs - inputs.old_logprobs).detach()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -inputs.advantages * ratio.clamp(low, high) * inputs.logprobs.nan_to_num(neginf=0.0)
    return loss, {"clip_fraction_low": ratio < low, "clip_fraction_high": ratio > high, **_measured(inputs, ratio)}


def sapo(inputs: LossInputs, *, tau_pos: float, tau_neg: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A sigmoid of the ratio in place of the clip: `-A (4 / tau) sigmoid(tau (r - 1))`, with tau_pos for A > 0, else
    tau_neg. Its gradient is that of -A r times 4 s (1 - s), where s is the sigmoid: a factor of 1 at r = 1, which is
    smaller the farther r is from 1, and the larger tau is.

    Source: Gao et al. 2025 (SAPO, arXiv 2511.20347) equations 5 and 6.
    """
    ratio = _ratio(inputs.logprobs - inputs.old_logprobs)
    tau = torch.where(inputs.advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))  # in ratio's dtype
    return -inputs.advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau), _measured(inputs, ratio)


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_surrogate(
    inputs: LossInputs, ratio: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    advantages = inputs.advantages
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    seen = {
        "clip_fraction_low": (ratio < low) & (advantages < 0),
        "clip_fraction_high": (ratio > high) & (advantages > 0),
    }
    return loss, {**seen, **_measured(inputs, ratio)}


def _measured(inputs: LossInputs, ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    approx_kl = kl_estimate(inputs.old_logprobs, inputs.logprobs, "k3")
    return {"ratio_mean": ratio, "ratio_max": ratio, "approx_kl": approx_kl}


def policy_terms(cfg: LossConfig, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of each token by the configured function, and its measurements by metric name; all [N].

    Raises: ValueError when a user-defined function returns something else.
    """
    name = f"algo.loss.kind {cfg.kind}"
    result = look_up(cfg.kind, LOSSES, "algo.loss.kind")(inputs, **cfg.args)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(
            f"{name} returned a {type(result).__name__}; it must return the loss of each token and a dict of "
            "measurements, {} for none: `return loss, {}`"
        )
    loss, measured = result
    for measurement, value in {"the loss": loss, **measured}.items():
        if not isinstance(value, torch.Tensor) or value.shape != inputs.logprobs.shape:
            returned = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"{name}: {measurement} is {returned}; it must be a tensor with one number for each trained token, "
                f"here [{len(inputs.logprobs)}]. The engine takes means and sums over tokens"
            )
    if inputs.logprobs.requires_grad and not loss.requires_grad:
        raise ValueError(f"{name}: the loss has no gradient; compute it from inputs.logprobs")
    if taken := {"policy", "kl", "entropy"} & set(measured):
        raise ValueError(f"{name} measures {sorted(taken)}, which are names of the engine's metrics; rename them")
    return loss, {f"loss/{measurement}": value for measurement, value in measured.items()}


def make_policy_loss(cfg: AlgoConfig) -> LossFn:
    """The loss function of the train engine for this config, for all policy losses: the loss of each token times its
    importance weight (algo.correction), `+ kl.coef * KL(policy, reference)` if kl.place is loss, `- entropy_coef *
    entropy`, weighted by loss_weight. A token whose loss_weight is 0 is not trained, and not counted.

    Only the config is sent to a rank, which imports a user-defined function by itself.

    Raises: ValueError when the batch or the outputs lack a field that the config needs; and as policy_terms.
    """
    return partial(_policy_loss, cfg)


def rows_without_gradient(cfg: AlgoConfig, samples: Sequence[Sample]) -> set[int]:
    """The indices of the samples at which the loss of this config has no gradient: nothing in them is trained, or their
    advantages are 0 and nothing else is in the loss. A user-defined loss may have a gradient at an advantage of 0."""
    other_terms = cfg.entropy_coef != 0 or (cfg.kl.coef > 0 and cfg.kl.place == "loss") or cfg.loss.kind not in LOSSES
    return {i for i, s in enumerate(samples) if not _factor(s, other_terms)[s.mask].any()}


def _factor(sample: Sample, any_advantage: bool) -> np.ndarray:
    """What multiplies the loss of each token, up to the sign."""
    weight = sample.loss_weight
    assert weight is not None, "assign_loss_weights comes first"
    return weight if any_advantage or sample.advantages is None else weight * sample.advantages


def _policy_loss(cfg: AlgoConfig, outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Iterable[Metric]]:
    if batch.advantages is None:
        raise ValueError("the policy loss needs batch.advantages; assign_advantages must run before packing")
    trained = batch.trained
    if not len(trained):
        return outputs.logprobs.index_select(0, trained).sum(), []
    inputs = _inputs(outputs, batch, trained)
    weight = batch.loss_weight.index_select(0, trained)
    loss, seen = policy_terms(cfg.loss, inputs)
    importance, measured = correct(cfg.correction, inputs)
    if importance is not None:
        loss = importance.to(loss.dtype) * loss
    terms = {"loss/policy": loss}
    if cfg.kl.coef > 0 and cfg.kl.place == "loss":
        if inputs.ref_logprobs is None:
            raise ValueError(f"algo.kl.coef is {cfg.kl.coef}, but the batch has no ref_logprobs")
        terms["loss/kl"] = kl_estimate(inputs.logprobs, inputs.ref_logprobs, cfg.kl.estimator)
        loss = loss + cfg.kl.coef * terms["loss/kl"]
    if inputs.entropy is not None:
        seen["loss/entropy"] = inputs.entropy
    if cfg.entropy_coef != 0:
        if inputs.entropy is None:
            raise ValueError(f"algo.entropy_coef is {cfg.entropy_coef}, but the outputs have no entropy")
        loss = loss - cfg.entropy_coef * inputs.entropy
    return (weight * loss).sum(), chain(_sums((terms, weight), (seen, torch.ones_like(weight))), measured)


def _inputs(outputs: Outputs, batch: Batch, trained: torch.Tensor) -> LossInputs:
    """trained: the indices of the N trained tokens. A prompt that rows share is never trained, so all trained tokens of
    a row are in one segment."""
    assert batch.advantages is not None
    columns = {column.name: values_of(batch, column.name) for column in columns_for("loss")}
    values = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, **columns}
    inputs = {name: x.index_select(0, trained) for name, x in values.items() if x is not None}
    inputs.setdefault("old_logprobs", inputs["logprobs"].detach())
    of_fields: dict[str, Any] = {name: inputs.pop(name, None) for name in _COLUMN_FIELDS}
    return LossInputs(row_lengths=batch.trained_lengths, columns=inputs, **of_fields)


def sft_loss(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Iterable[Metric]]:
    """Negative log-likelihood of the trained tokens, weighted by loss_weight; uses no advantages."""
    trained = batch.scored
    nll = -outputs.logprobs.index_select(0, trained)
    weight = batch.loss_weight.index_select(0, trained)
    return (weight * nll).sum(), _sums(({"loss/nll": nll}, torch.ones_like(weight)))


def _sums(*groups: tuple[dict[str, torch.Tensor], torch.Tensor]) -> Iterator[Metric]:
    """One metric for each [N] tensor of a group (values, weight): sum(weight * value) with weight sum(weight), or the
    maximum. All numbers are copied to the host at once, for which the iterator waits."""
    numbers = []
    for values, weight in groups:
        weight = weight.double()
        for name, value in values.items():
            is_max = _declared(name)[0] == "max"
            numbers.append(value.detach().max() if is_max else (weight * value.detach()).sum())
        numbers.append(weight.sum())
    return _metrics([[*values] for values, _ in groups], fetched(torch.stack([n.double() for n in numbers])))


def _metrics(groups: list[list[str]], read: Callable[[], torch.Tensor]) -> Iterator[Metric]:
    """groups: the names of the metrics. read: returns their numbers, with the weight of each group after its own."""
    numbers = iter(read().tolist())
    for names in groups:
        sums, total = [next(numbers) for _ in names], next(numbers)
        for name, number in zip(names, sums, strict=True):
            reduce, unit = _declared(name)
            weight_of_all = 1.0 if reduce == "max" else total
            yield Metric(name=name, sum=number, weight=weight_of_all, reduce=reduce, unit=unit)


def _declared(name: str) -> tuple[Reduce, str]:
    return _METRICS.get(name, ("mean", ""))


_METRICS: dict[str, tuple[Reduce, str]] = {  # any other metric is a mean without a unit
    "loss/kl": ("mean", "nats"),
    "loss/nll": ("mean", "nats"),
    "loss/entropy": ("mean", "nats"),
    "loss/approx_kl": ("mean", "nats"),
    "loss/clip_fraction_low": ("mean", "fraction"),
    "loss/clip_fraction_high": ("mean", "fraction"),
    "loss/clip_fraction_dual": ("mean", "fraction"),
    "loss/ratio_max": ("max", ""),
}

LOSSES: dict[str, PolicyLossFn] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo, "sapo": sapo}
"""algo.loss.kind -> function of LossInputs and the other keys of algo.loss."""
