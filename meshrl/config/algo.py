"""The keys of algo.* and their checks. A user-defined loss or advantage is imported here, before any model is loaded,
so that its keys can be compared with its signature. No other check runs user code."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, TypeAdapter, ValidationError, field_validator, model_validator

from meshrl.config.base import OnlyWith, Slice, Unless
from meshrl.config.case import Case, Problem
from meshrl.config.kinds import ADVANTAGES, described
from meshrl.config.schema import words
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, import_object, similar_names

LOSS_KIND = "algo.loss.kind"
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_ANNOTATIONS = "Annotate it as bool, int, float, str, Literal, list or dict, or not at all."


_KL = Unless("algo.kl.coef", 0, "algo.kl.coef is 0")
_REJECTS = Unless("algo.correction.rejection.measure", "off")


class KlConfig(Slice):
    coef: float = Field(0.0, ge=0)
    """weight of the KL divergence from the reference, which is the model at the start; 0 = no reference is built"""
    estimator: Annotated[Literal["k1", "k2", "k3"], _KL] = "k3"
    """KL estimator per token: use k3 or k2 in the loss, k1 in the reward (k1 in the loss only adds noise)"""
    place: Annotated[Literal["loss", "reward"], _KL] = "loss"
    """loss = a term of the loss; reward = coef times the sum of the estimates at all trained tokens of a trajectory is
    subtracted from its reward, before the group's mean and std (the same for all tokens, as in verl for GRPO)"""


LOSS_ARGS: dict[str, dict[str, float | None]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
}
"""algo.loss.kind -> the keys of algo.loss that this loss has, with their defaults (docs/add_an_algorithm.md)."""


class LossConfig(Slice):
    """The keys of a built-in loss."""

    kind: Literal["ppo_clip", "gspo", "cispo", "sapo"] = "ppo_clip"
    """ppo_clip = PPO's clipped surrogate; gspo = the same with one ratio for each row, the geometric mean of its
    tokens' ratios (use aggregation seq_mean_token_mean); cispo = the log-probability times the clipped ratio; sapo = a
    sigmoid of the ratio in place of the clip; or a user-defined function as package.module:name, which gets the other
    keys of this section as arguments (docs/add_an_algorithm.md)"""
    clip_low: float = Field(0.2, gt=0, le=1)
    """the ratio is clipped below at 1 - clip_low; the default of gspo is 3e-4, that of cispo is 1: no lower bound"""
    clip_high: float = Field(0.2, gt=0)
    """the ratio is clipped above at 1 + clip_high; 0.28 is DAPO's clip-higher; the default of gspo is 4e-4, that of
    cispo is 4"""
    dual_clip: float | None = Field(None, gt=1)
    """largest ratio by which ppo_clip may multiply a negative advantage (3.0 is usual); null = off"""
    tau_pos: float = Field(1.0, gt=0)
    """of sapo, at positive advantages: how fast the gradient's factor decreases with the ratio's distance from 1"""
    tau_neg: float = Field(1.05, gt=0)
    """the same at negative advantages"""

    @model_validator(mode="wrap")
    @classmethod
    def _defaults_of_its_kind(cls, given: Any, validate: Callable[[Any], LossConfig]) -> LossConfig:
        kind = given.get("kind") if isinstance(given, dict) else None
        if not isinstance(kind, str):
            return validate(given)
        made = validate({**LOSS_ARGS.get(kind, {}), **given})
        made.model_fields_set.intersection_update(given)  # the defaults were not given
        return made

    @property
    def args(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return {name: getattr(self, name) for name in LOSS_ARGS[self.kind]}


class UserLossConfig(Slice):
    """A user-defined loss, in place of a LossConfig: the dotted path of its function, and its arguments."""

    model_config = ConfigDict(extra="allow")

    kind: str

    @property
    def args(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return dict(self.model_extra or {})


class RejectionConfig(Slice):
    measure: Literal["off", "k1", "k2", "k3"] = "off"
    """difference between sampler and trainer by which tokens are rejected: an estimate of KL(sampler, trainer) in nats,
    as algo.kl.estimator; k1 = the negative log-ratio of a token; off = none is rejected"""
    level: Annotated[Literal["token", "seq_mean", "seq_max"], _REJECTS] = "token"
    """token = reject single tokens; seq_mean, seq_max = reject all tokens of a row, by its mean or maximum"""
    low: Annotated[float | None, _REJECTS] = None
    """reject below this, in nats; only for k1, where it is negative; null = no bound"""
    high: Annotated[float | None, _REJECTS] = None
    """reject above this, in nats; null = no bound"""


class CorrectionConfig(Slice):
    """`load` replaces kind auto where the loop and the engine decide what it means; elsewhere the device of the loss
    decides (`kind_on`)."""

    kind: Literal["auto", "off", "truncate", "mask"] = "auto"
    """truncate = the weight is the ratio, clipped to [low, high]; mask = weight 0 if the ratio is outside [low, high];
    off = weight 1; auto = truncate if samples may be of older weights (loop.max_staleness above 0), if rollout.engine
    is not embedded, or on an accelerator, else off"""
    level: Literal["token", "sequence"] = "token"
    """token = the ratio trainer / sampler of each token's probability; sequence = its product over the trained tokens
    of a row, for each of them"""
    low: float | None = Field(None, ge=0, le=1)
    """lower bound of the ratio; null = none"""
    high: float = Field(2.0, ge=1)
    """upper bound of the ratio; 2 is usual at level token, 2 to 10 at level sequence"""
    rejection: RejectionConfig = RejectionConfig()
    """tokens or rows that get weight 0 because sampler and trainer differ too much, with any kind; `off` is short for
    {measure: off}"""

    def kind_on(self, device_type: str) -> Literal["off", "truncate", "mask"]:
        """The kind on devices of this type. On a CPU the embedded engine gives the trainer's logprobs; on accelerators,
        where other kernels compute them, this was not measured."""
        if self.kind != "auto":
            return self.kind
        return "off" if device_type == "cpu" else "truncate"


class AlgoConfig(Slice):
    advantage: str = Field(
        "grpo",
        description=f"advantage from a sample's reward r and its group: {described(ADVANTAGES)}; or a user-defined "
        "function as package.module:name (docs/add_an_algorithm.md)",
    )
    advantage_by_env: dict[str, str] = Field({})
    """other advantages, by the `env` of the rows: names of data.sources, or what data.map returns as env"""
    advantage_eps: float = Field(1e-6, gt=0)
    """added to the group's std; groups with a smaller std get advantage 0"""
    loss: SerializeAsAny[LossConfig] = LossConfig()
    """the policy loss; a kind alone, such as `loss: gspo`, is short for {kind: gspo}"""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = "token_mean"
    """how token losses become the loss of an optimizer step: token_mean = mean over all tokens; seq_mean_token_mean =
    mean over rows of each row's mean; seq_mean_token_sum = mean over rows of each row's sum; constant_length =
    seq_mean_token_sum divided by algo.constant_length"""
    constant_length: Annotated[int | None, OnlyWith("algo.aggregation", "constant_length")] = Field(None, ge=1)
    """tokens by which aggregation constant_length divides each row's sum; null = rollout.sampling.max_new_tokens"""
    truncated: Literal["train", "mask"] = "train"
    """trajectories that were cut off (by max_new_tokens, the context or agent.args.max_turns): train = like all others,
    with the reward they got; mask = their tokens enter neither the loss nor its denominator, while their rewards count
    in the group's mean and std (DAPO's overlong filtering, TRL's mask_truncated_completions)"""
    kl: KlConfig = KlConfig()
    """KL divergence from the reference model; `off` is short for {coef: 0}"""
    correction: CorrectionConfig = CorrectionConfig()
    """importance weights of the policy loss, for samples from older weights, or from an engine other than the
    trainer's (docs/correction.md); a kind alone, such as `correction: mask`, is short for {kind: mask}"""
    entropy_coef: float = 0.0
    """weight of an entropy bonus in the loss; 0 = entropy is only reported"""

    @property
    def advantages(self) -> dict[str, str]:
        """All advantages, by their keys."""
        by_env = {f"algo.advantage_by_env.{env}": kind for env, kind in self.advantage_by_env.items()}
        return {"algo.advantage": self.advantage} | by_env

    @field_validator("loss", mode="wrap")
    @classmethod
    def _user_loss(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        kind = value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and ":" in kind:
            return UserLossConfig.model_validate(value)
        return value if isinstance(value, UserLossConfig) else validate(value)


def algorithm_problems(case: Case) -> Iterator[Problem]:
    """Problems of algo.*; user-defined functions are checked only for training."""
    algo, kl = case.rl.algo, case.rl.algo.kl
    if kl.coef > 0 and kl.estimator == "k1" and kl.place == "loss":
        text = (
            "k1 as a term of the loss has zero mean gradient on-policy: it would add noise, and not keep the policy "
            "near the reference. Use k3 or k2 in the loss, or k1 with place: reward."
        )
        yield Problem(("algo.kl.estimator", "algo.kl.place"), text, void=("algo.kl.estimator",))
    yield from _correction_problems(algo.correction)
    if case.purpose == "train":
        for key, path in algo.advantages.items():
            yield from _user_function(key, path, "groups", {})
        yield from _user_function(LOSS_KIND, algo.loss.kind, "inputs", algo.loss.args)


def correction_of_auto(staleness: int, engine: str) -> tuple[Literal["auto", "truncate"], str]:
    """(the kind of algo.correction that auto means, why); auto where the device decides. staleness: of loop.*. engine:
    rollout.engine."""
    if staleness:
        return "truncate", f"loop.max_staleness is {staleness}"
    if engine != "embedded":
        return "truncate", f"rollout.engine is {engine}"
    return "auto", "off on a CPU, else truncate"


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
        text = (
            "a lower bound needs measure k1 with level token or seq_mean: k2 and k3 are never negative, and the "
            "maximum of a row has no useful lower bound. Give high only."
        )
        yield Problem((bounds[0], f"{section}.measure", f"{section}.level"), text, void=bounds[:1])
    elif (low is not None and low >= 0) or (high is not None and high <= 0):
        yield Problem(bounds, "low must be below 0 and high above 0: the measure is 0 where sampler and trainer agree.")


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
    accepted = {p.name: p for p in parameters[1:] if p.kind in _BY_NAME}
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    for name, value in args.items():
        if name in accepted:
            yield from _wrong_type(f"{section}.{name}", path, function, accepted[name], value)
        elif not takes_any:
            close = [f"{section}.{each}" for each in similar_names(name, accepted)]
            hint = f"Nearest: {', '.join(close)}." if close else f"It takes {', '.join(accepted) or 'none'}."
            yield Problem((f"{section}.{name}",), f"no argument of {path}. {hint}")
    for name, parameter in accepted.items():
        if parameter.default is Parameter.empty and name not in args:
            argument = f"{section}.{name}" if key == LOSS_KIND else key
            yield Problem((argument,), f"required by {path}{signature}, but not given.")


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
