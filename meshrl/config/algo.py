from typing import Literal

from meshrl.config.base import Slice, field


class KlConfig(Slice):
    coef: float = field(0.0, "weight of the KL to the model at the start; 0 = no reference model is built", ge=0)
    estimator: Literal["k1", "k2", "k3"] = field(
        "k3", "estimator per token; in the loss k3 or k2, in the reward k1 (k1 in the loss only adds noise)"
    )
    place: Literal["loss", "reward"] = field("loss", "a term of the loss, or subtracted from each token's reward")


class LossConfig(Slice):
    kind: Literal["ppo_clip"] = field("ppo_clip", "PPO's clipped surrogate")
    clip_low: float = field(0.2, "the ratio is clipped below at 1 - clip_low", gt=0, le=1)
    clip_high: float = field(0.2, "the ratio is clipped above at 1 + clip_high; 0.28 is DAPO's clip-higher", gt=0)
    dual_clip: float | None = field(
        None, "largest ratio that a negative advantage may be multiplied with (3.0 is usual); null = off", gt=1
    )


class AlgoConfig(Slice):
    advantage: Literal["grpo", "dr_grpo", "rloo"] = field(
        "grpo", "baseline from the group: grpo (r - mean) / std, dr_grpo r - mean, rloo r - mean of the others"
    )
    advantage_eps: float = field(1e-6, "added to the group's std; groups with a smaller std get advantage 0", gt=0)
    loss: LossConfig = field(LossConfig(), "the policy loss; `ppo_clip` is short for {kind: ppo_clip}")
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = field(
        "token_mean", "what the sum over all tokens of an optimizer step is divided by"
    )
    constant_length: int | None = field(
        None, "tokens a row counts for under constant_length; null = rollout.sampling.max_new_tokens", ge=1
    )
    kl: KlConfig = field(KlConfig(), "KL to the reference; `off` is short for {coef: 0}")
    correction: Literal["off"] = field(
        "off", "importance correction from sampler to trainer; off: at staleness 0 both have the same weights"
    )
    entropy_coef: float = field(0.0, "weight of an entropy bonus in the loss; 0 = entropy is only measured")
