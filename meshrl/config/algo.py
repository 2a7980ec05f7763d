"""The keys of algo.* and their checks. A user-defined loss or advantage is imported here, before any model is loaded,
so that its keys can be compared with its signature. No other check runs user code."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from typing import Any, Literal

from pydantic import ConfigDict, SerializeAsAny, TypeAdapter, ValidationError, field_validator

from meshrl.config.base import Slice, field
from meshrl.config.schema import words
from meshrl.config.source import Problem
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, import_object, similar_names

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo")
LOSS_KIND = "algo.loss.kind"
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

_ANNOTATIONS = "Annotate it as bool, int, float, str, Literal, list or dict, or not at all."


class KlConfig(Slice):
    coef: float = field(
        0.0,
        "weight of the KL divergence from the reference, which is the model at the start; 0 = no reference is built",
        ge=0,
    )
    estimator: Literal["k1", "k2", "k3"] = field(
        "k3", "KL estimator per token: use k3 or k2 in the loss, k1 in the reward (k1 in the loss only adds noise)"
    )
    place: Literal["loss", "reward"] = field(
        "loss", "loss = a term of the loss; reward = subtracted from each token's reward"
    )


class LossConfig(Slice):
    """The keys of a built-in loss."""

    kind: Literal["ppo_clip"] = field(
        "ppo_clip",
        "PPO's clipped surrogate loss; or a user-defined function as package.module:name, which gets the other keys of "
        "this section as arguments (docs/add_an_algorithm.md)",
    )
    clip_low: float = field(0.2, "the ratio is clipped below at 1 - clip_low", gt=0, le=1)
    clip_high: float = field(0.2, "the ratio is clipped above at 1 + clip_high; 0.28 is DAPO's clip-higher", gt=0)
    dual_clip: float | None = field(
        None, "largest ratio by which a negative advantage may be multiplied (3.0 is usual); null = off", gt=1
    )

    @property
    def args(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return self.model_dump(exclude={"kind"})


class UserLossConfig(Slice):
    """A user-defined loss, in place of a LossConfig: the dotted path of its function, and its arguments."""

    model_config = ConfigDict(extra="allow")

    kind: str

    @property
    def args(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return dict(self.model_extra or {})


class RejectionConfig(Slice):
    measure: Literal["off", "k1", "k2", "k3"] = field(
        "off",
        "difference between sampler and trainer by which tokens are rejected: an estimate of KL(sampler, trainer) in "
        "nats, as algo.kl.estimator; k1 = the negative log-ratio of a token; off = none is rejected",
    )
    level: Literal["token", "seq_mean", "seq_max"] = field(
        "token", "token = reject single tokens; seq_mean, seq_max = reject all tokens of a row, by its mean or maximum"
    )
    low: float | None = field(None, "reject below this, in nats; only for k1, where it is negative; null = no bound")
    high: float | None = field(None, "reject above this, in nats; null = no bound")


class CorrectionConfig(Slice):
    """`load` replaces kind auto by the kind that it means for the run. The loss counts auto as off."""

    kind: Literal["auto", "off", "truncate", "mask"] = field(
        "auto",
        "truncate = the weight is the ratio, cut to [low, high]; mask = weight 0 if the ratio is outside [low, high]; "
        "off = weight 1; auto = truncate if samples may be of older weights (loop.max_staleness above 0) or "
        "rollout.engine is not embedded, else off",
    )
    level: Literal["token", "sequence"] = field(
        "token",
        "token = the ratio trainer / sampler of each token's probability; sequence = its product over the trained "
        "tokens of a row, for each of them",
    )
    low: float | None = field(None, "lower bound of the ratio; null = none", ge=0, le=1)
    high: float = field(2.0, "upper bound of the ratio; 2 is usual at level token, 2 to 10 at level sequence", ge=1)
    rejection: RejectionConfig = field(
        RejectionConfig(),
        "tokens or rows that get weight 0 because sampler and trainer differ too much, with any kind; `off` is short "
        "for {measure: off}",
    )


class AlgoConfig(Slice):
    advantage: str = field(
        "grpo",
        "advantage from a sample's reward r and its group: grpo = (r - mean) / std, dr_grpo = r - mean, rloo = r - "
        "mean of the others; or a user-defined function as package.module:name (docs/add_an_algorithm.md)",
    )
    advantage_eps: float = field(1e-6, "added to the group's std; groups with a smaller std get advantage 0", gt=0)
    loss: SerializeAsAny[LossConfig] = field(
        LossConfig(), "the policy loss; a kind alone, such as `loss: ppo_clip`, is short for {kind: ppo_clip}"
    )
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = field(
        "token_mean",
        "how token losses become the loss of an optimizer step: token_mean = mean over all tokens; "
        "seq_mean_token_mean = mean over rows of each row's mean; seq_mean_token_sum = mean over rows of each row's "
        "sum; constant_length = seq_mean_token_sum divided by algo.constant_length",
    )
    constant_length: int | None = field(
        None,
        "tokens by which aggregation constant_length divides each row's sum; null = rollout.sampling.max_new_tokens",
        ge=1,
    )
    truncated: Literal["train", "mask"] = field(
        "train",
        "trajectories that were cut off (by max_new_tokens, the context or max_turns): train = like all others, with "
        "the reward they got; mask = their tokens enter neither the loss nor its denominator, while their rewards "
        "count in the group's mean and std (DAPO's overlong filtering, TRL's mask_truncated_completions)",
    )
    kl: KlConfig = field(KlConfig(), "KL divergence from the reference model; `off` is short for {coef: 0}")
    correction: CorrectionConfig = field(
        CorrectionConfig(),
        "importance weights of the policy loss, for samples that other weights or another engine than the trainer's "
        "sampled (docs/correction.md); a kind alone, such as `correction: mask`, is short for {kind: mask}",
    )
    entropy_coef: float = field(0.0, "weight of an entropy bonus in the loss; 0 = entropy is only reported")

    @field_validator("loss", mode="wrap")
    @classmethod
    def _user_loss(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        kind = value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and ":" in kind:
            return UserLossConfig.model_validate(value)
        return value if isinstance(value, UserLossConfig) else validate(value)


def algorithm_problems(algo: AlgoConfig, training: bool) -> Iterator[Problem]:
    """Problems of algo.*; user-defined functions are checked only for training."""
    kl = algo.kl
    if kl.coef > 0 and kl.estimator == "k1" and kl.place == "loss":
        yield Problem(
            ("algo.kl.estimator", "algo.kl.place"),
            "k1 as a term of the loss has zero mean gradient on-policy: it would add noise, and not keep the policy "
            "near the reference. Use k3 or k2 in the loss, or k1 with place: reward.",
        )
    yield from _correction_problems(algo.correction)
    if training:
        yield from _user_function("algo.advantage", algo.advantage, "groups", {})
        yield from _user_function(LOSS_KIND, algo.loss.kind, "inputs", algo.loss.args)


def correction_of_auto(staleness: int, engine: str) -> tuple[Literal["off", "truncate"], str]:
    """(the kind of algo.correction that auto means, why). staleness: of loop.*. engine: rollout.engine."""
    if staleness:
        return "truncate", f"loop.max_staleness is {staleness}"
    if engine != "embedded":
        return "truncate", f"rollout.engine is {engine}"
    return "off", "sampler and trainer agree"


def _correction_problems(correction: CorrectionConfig) -> Iterator[Problem]:
    section, rejection = "algo.correction", correction.rejection
    if correction.low is not None and correction.low >= correction.high:
        yield Problem((f"{section}.low", f"{section}.high"), "low must be below high.")
    if rejection.measure == "off":
        return
    section = f"{section}.rejection"
    low, high, bounds = rejection.low, rejection.high, (f"{section}.low", f"{section}.high")
    if low is None and high is None:
        yield Problem((f"{section}.high",), "without a bound nothing is rejected: give high, or low with measure k1.")
    if low is not None and (rejection.measure != "k1" or rejection.level == "seq_max"):
        yield Problem(
            (f"{section}.low", f"{section}.measure", f"{section}.level"),
            "a lower bound needs measure k1 with level token or seq_mean: k2 and k3 are never negative, and the "
            "maximum of a row has no useful lower bound. Give high only.",
        )
    elif (low is not None and low >= 0) or (high is not None and high <= 0):
        yield Problem(bounds, "low must be below 0 and high above 0: the measure is 0 where sampler and trainer agree.")


def unused_algo_keys(algo: AlgoConfig, correction: str, why: str) -> dict[str, str]:
    """Keys of algo.* that its other choices leave without effect -> why. correction: the kind that algo.correction
    means in this run, and why."""
    found: dict[str, str] = {}
    if algo.kl.coef == 0:
        found["algo.kl.estimator"] = found["algo.kl.place"] = "algo.kl.coef is 0"
    if algo.aggregation != "constant_length":
        found["algo.constant_length"] = f"algo.aggregation is {algo.aggregation}"
    if algo.advantage != "grpo":
        found["algo.advantage_eps"] = f"algo.advantage is {algo.advantage}, which does not divide by the group's std"
    if correction == "off":
        names = [f"algo.correction.{name}" for name in ("level", "low", "high")]
        found |= dict.fromkeys(names, f"algo.correction.kind is {why}")
    if algo.correction.rejection.measure == "off":
        names = [f"algo.correction.rejection.{name}" for name in ("level", "low", "high")]
        found |= dict.fromkeys(names, "algo.correction.rejection.measure is off")
    return found


def _user_function(key: str, path: str, first: str, args: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of a user-defined function: of its import, its first argument, and its other keys. None for a built-in
    function. A malformed path and a missing module are reported by check._kinds, as for every dotted path."""
    if not DOTTED_PATH.fullmatch(path) or not can_be_imported(path):
        return
    try:
        function = import_object(path)
        signature = inspect.signature(function)
    except ConfigError as error:
        yield Problem((key,), f"{error}.")
        return
    except (TypeError, ValueError):
        yield Problem((key,), f"must be a function of ({first}, ...), but is of type {type(function).__name__}.")
        return
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (*_BY_POSITION, Parameter.VAR_POSITIONAL):
        yield Problem((key,), f"must take the {first} as its first argument, but its signature is {signature}.")
        return
    section = key.rpartition(".")[0]
    own = {p.name: p for p in parameters[1:] if p.kind in _BY_NAME}
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    for name, value in args.items():
        if name in own:
            yield from _wrong_type(f"{section}.{name}", path, function, own[name], value)
        elif not takes_any:
            yield Problem((f"{section}.{name}",), f"no argument of {path}. {_nearest(section, name, own)}")
    for name, parameter in own.items():
        if parameter.default is Parameter.empty and name not in args:
            where = f"{section}.{name}" if key == LOSS_KIND else key
            yield Problem((where,), f"required by {path}{signature}, but not given.")


def _nearest(section: str, name: str, own: Mapping[str, Parameter]) -> str:
    close = similar_names(name, own)
    if close:
        return f"Nearest: {', '.join(f'{section}.{known}' for known in close)}."
    return f"It takes {', '.join(own) or 'none'}."


def _wrong_type(key: str, path: str, function: Any, parameter: Parameter, value: Any) -> Iterator[Problem]:
    """Compares the value with the annotation, as strictly as for any key: 1 is a float, but true is not a number."""
    annotation = parameter.annotation
    if annotation is Parameter.empty:
        return
    try:
        if isinstance(annotation, str):  # as `from __future__ import annotations` leaves it
            annotation = eval(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
        adapter = TypeAdapter[Any](annotation)
    except Exception:  # evaluating the user's annotation may raise anything
        text = f"{path} annotates it as {parameter.annotation}; no value of a config can be checked against this type."
        yield Problem((key,), f"{text} {_ANNOTATIONS}")
        return
    try:
        if adapter.validate_json(json.dumps(value), strict=True) != value:
            yield Problem((key,), f"{path} annotates it as {inspect.formatannotation(annotation)}. {_ANNOTATIONS}")
    except ValidationError:
        try:
            allowed = words(annotation)
        except KeyError:  # a type that only a function of the user takes
            allowed = inspect.formatannotation(annotation)
        yield Problem((key,), f"allowed: {allowed} (argument of {path}).")
