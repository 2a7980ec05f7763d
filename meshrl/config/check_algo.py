"""Checks of algo.*. A user-defined loss or advantage is imported here, before any model is loaded, so that its keys can
be compared with its signature. No other check runs code of the user."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from inspect import Parameter
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshrl.config.algo import AlgoConfig
from meshrl.config.schema import words
from meshrl.config.source import Problem
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, import_object, similar_names

LOSS_KIND = "algo.loss.kind"
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

_ANNOTATIONS = "Annotate it as bool, int, float, str, Literal, list or dict, or not at all."


def algorithm_problems(algo: AlgoConfig, training: bool) -> Iterator[Problem]:
    """What is wrong with the algorithm; user-defined functions are checked only for training."""
    kl = algo.kl
    if kl.coef > 0 and kl.estimator == "k1" and kl.place == "loss":
        yield Problem(
            ("algo.kl.estimator", "algo.kl.place"),
            "k1 as a term of the loss has zero mean gradient on-policy: it would add noise and hold nothing back. "
            "Use k3 or k2 in the loss, or k1 with place: reward.",
        )
    if training:
        yield from _own("algo.advantage", algo.advantage, "groups", {})
        yield from _own(LOSS_KIND, algo.loss.kind, "inputs", algo.loss.args)


def unused_algo_keys(algo: AlgoConfig) -> dict[str, str]:
    """Keys of algo.* that its other choices leave without effect -> why."""
    found: dict[str, str] = {}
    if algo.kl.coef == 0:
        found["algo.kl.estimator"] = found["algo.kl.place"] = "algo.kl.coef is 0"
    if algo.aggregation != "constant_length":
        found["algo.constant_length"] = f"algo.aggregation is {algo.aggregation}"
    if algo.advantage != "grpo":
        found["algo.advantage_eps"] = f"algo.advantage is {algo.advantage}, which does not divide by the group's std"
    return found


def _own(key: str, path: str, first: str, args: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of a user-defined function: of its import, its first argument, and its keys beside `key`. None for a
    built-in one. That a path is malformed or a module missing is reported as for any other dotted path."""
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
    """Compares the value with the annotation, as strictly as for any key: 1 is a float, but true is no number."""
    annotation = parameter.annotation
    if annotation is Parameter.empty:
        return
    try:
        if isinstance(annotation, str):  # as `from __future__ import annotations` leaves it
            annotation = eval(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
        adapter = TypeAdapter[Any](annotation)
    except Exception:  # evaluating the user's annotation may raise anything
        text = f"{path} annotates it as {parameter.annotation}, which no value of a config can be checked against."
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
