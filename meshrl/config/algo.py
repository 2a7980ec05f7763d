from typing import Literal

from meshrl.config.base import Slice, field


class KlConfig(Slice):
    coef: float = field(0.0, "weight of the KL to the reference; 0 = no reference model is built", ge=0)
    estimator: Literal["k1", "k2", "k3"] = field(
        "k3", "per-token estimator; in the loss k1 has zero mean gradient on-policy"
    )
    place: Literal["loss", "reward"] = field("loss", "added to the loss, or subtracted from per-token rewards")


class LossConfig(Slice):
    kind: Literal["ppo_clip"] = field("ppo_clip", "PPO's clipped surrogate")
    clip_low: float = field(0.2, "lower clip: ratio >= 1 - clip_low", gt=0)
    clip_high: float = field(0.2, "upper clip: ratio <= 1 + clip_high; 0.28 is DAPO's clip-higher", gt=0)
    dual_clip: float | None = field(
        None, "bound c > 1 of the loss for negative advantages (3.0 is usual); off by default", gt=1
    )


class AlgoConfig(Slice):
    advantage: Literal["grpo", "dr_grpo", "rloo"] = field("grpo", "group baseline: grpo divides by the group's std")
    advantage_eps: float = field(1e-6, "groups whose reward std is below this get advantage 0; added to std", gt=0)
    loss: LossConfig = field(LossConfig(), "policy loss; the string `ppo_clip` is short for {kind: ppo_clip}")
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = field(
        "token_mean", "the one denominator of an optimizer step"
    )
    constant_length: int | None = field(
        None, "tokens that divide under constant_length; default rollout.sampling.max_new_tokens"
    )
    kl: KlConfig = field(KlConfig(), "KL to the reference; the string `off` is short for {coef: 0}")
    correction: Literal["off"] = field("off", "importance correction sampler -> trainer; off at staleness 0")
    entropy_coef: float = field(0.0, "weight of an entropy bonus in the loss; 0 = entropy is a metric only")
