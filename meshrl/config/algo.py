from collections.abc import Callable
from typing import Any, Literal

from pydantic import ConfigDict, SerializeAsAny, field_validator

from meshrl.config.base import Slice, field

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo")


class KlConfig(Slice):
    coef: float = field(0.0, "weight of the KL to the model at the start; 0 = no reference model is built", ge=0)
    estimator: Literal["k1", "k2", "k3"] = field(
        "k3", "estimator per token; in the loss k3 or k2, in the reward k1 (k1 in the loss only adds noise)"
    )
    place: Literal["loss", "reward"] = field("loss", "a term of the loss, or subtracted from each token's reward")


class LossConfig(Slice):
    """The keys of a built-in loss."""

    kind: Literal["ppo_clip"] = field(
        "ppo_clip",
        "PPO's clipped surrogate; or a function of your own as package.module:name, whose arguments are then the keys "
        "beside kind (docs/add_an_algorithm.md)",
    )
    clip_low: float = field(0.2, "the ratio is clipped below at 1 - clip_low", gt=0, le=1)
    clip_high: float = field(0.2, "the ratio is clipped above at 1 + clip_high; 0.28 is DAPO's clip-higher", gt=0)
    dual_clip: float | None = field(
        None, "largest ratio that a negative advantage may be multiplied with (3.0 is usual); null = off", gt=1
    )

    @property
    def args(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return self.model_dump(exclude={"kind"})


class OwnLossConfig(Slice):
    """In place of a LossConfig: a user-defined function by its dotted path, and its arguments."""

    model_config = ConfigDict(extra="allow")

    kind: str

    @property
    def args(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return dict(self.model_extra or {})


class AlgoConfig(Slice):
    advantage: str = field(
        "grpo",
        "baseline from the group: grpo (r - mean) / std, dr_grpo r - mean, rloo r - mean of the others; or a function "
        "of your own as package.module:name (docs/add_an_algorithm.md)",
    )
    advantage_eps: float = field(1e-6, "added to the group's std; groups with a smaller std get advantage 0", gt=0)
    loss: SerializeAsAny[LossConfig] = field(
        LossConfig(), "the policy loss; `ppo_clip` is short for {kind: ppo_clip}, and so for a function of your own"
    )
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = field(
        "token_mean", "what the sum over all tokens of an optimizer step is divided by"
    )
    constant_length: int | None = field(
        None, "tokens a row counts for under constant_length; null = rollout.sampling.max_new_tokens", ge=1
    )
    truncated: Literal["train", "mask"] = field(
        "train",
        "trajectories that were cut off (by max_new_tokens, the context or max_turns): train = like all others, with "
        "the reward they got; mask = their tokens enter neither the loss nor its denominator, while their rewards "
        "count in the group's mean and std (DAPO's overlong filtering, as TRL's mask_truncated_completions)",
    )
    kl: KlConfig = field(KlConfig(), "KL to the reference; `off` is short for {coef: 0}")
    correction: Literal["off"] = field(
        "off", "importance correction from sampler to trainer; off: at staleness 0 both have the same weights"
    )
    entropy_coef: float = field(0.0, "weight of an entropy bonus in the loss; 0 = entropy is only measured")

    @field_validator("loss", mode="wrap")
    @classmethod
    def _own_loss(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        kind = value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and ":" in kind:
            return OwnLossConfig.model_validate(value)
        return value if isinstance(value, OwnLossConfig) else validate(value)
