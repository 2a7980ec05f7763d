"""What a reward's `kind` in the config stands for: a row of REWARDS, or a dotted path to a user's function.

A reward function takes `(completion: str, answer, **keywords)` and returns a finite number, or is `async` and does
so. Of these keywords it gets the ones it names:

    prompt      dict: id, messages, env, meta of the prompt
    messages    list of every parsed message of the trajectory's turns, in order
    stop_reason why the last turn ended: stop | length | context
    num_tokens  tokens sampled in the whole trajectory

and the `args` of its config entry. This file imports the standard library only: it runs in the workers.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshrl.core.errors import ConfigError
from meshrl.reward.format import check_args as check_format
from meshrl.reward.format import format_match
from meshrl.reward.math_answer import check_args as check_math_answer
from meshrl.reward.math_answer import math_answer

OFFERED = ("prompt", "messages", "stop_reason", "num_tokens")

RewardFn = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grader:
    """A reward function with its config arguments, and the offered keywords it takes."""

    function: RewardFn
    args: dict[str, Any]
    takes: tuple[str, ...]
    is_async: bool

    def __call__(self, payload: dict[str, Any]) -> Any:
        """Call the function on `payload`: completion, answer and everything OFFERED."""
        keywords = {name: payload[name] for name in self.takes}
        return self.function(payload["completion"], payload["answer"], **keywords, **self.args)


def resolve_reward(kind: str) -> RewardFn:
    """The function behind a name of REWARDS or a dotted path `package.module:function`.

    Raises: ConfigError when there is none; it says what was found instead.
    """
    if ":" not in kind:
        if kind not in REWARDS:
            raise ConfigError(
                f"reward kind {kind!r} is unknown; allowed: {', '.join(REWARDS)}, "
                f"or a dotted path package.module:function{_did_you_mean(kind, REWARDS)}"
            )
        return REWARDS[kind]
    module_name, _, name = kind.partition(":")
    try:
        module = importlib.import_module(module_name)
    except MemoryError:
        raise  # says nothing about the kind
    except Exception as error:  # user code: importing it may raise anything
        raise ConfigError(
            f"reward kind {kind!r}: importing {module_name!r} raised {type(error).__name__}: {error}; a module is "
            f"looked for in the working folder and on PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(
            f"reward kind {kind!r}: {module.__file__} has no function {name!r}{_did_you_mean(name, public)}"
        )
    return function


def make_grader(term: str, kind: str, args: dict[str, Any]) -> Grader:
    """Resolve a config entry and check that its function can be called as it will be.

    Raises: ConfigError that names the term, for an unknown kind, wrong or missing arguments.
    """
    function = resolve_reward(kind)
    try:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        first = [p.name for p in list(parameters)[:2]]
        if first[:1] != ["completion"] and ("completion" in first or set(first) & set(OFFERED)):
            raise TypeError(
                f"the first two arguments are the completion and the answer, in this order; this function has {first}"
            )
        own = [p.name for p in list(parameters)[2:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        unknown = [] if open_ended else [name for name in args if name not in own]
        if unknown:
            settable = [name for name in own if name not in OFFERED]
            raise TypeError(
                f"no argument {unknown[0]!r}; allowed: {', '.join(settable) or 'none'}"
                f"{_did_you_mean(unknown[0], settable)}"
            )
        takes = tuple(name for name in OFFERED if (open_ended or name in own) and name not in args)
        signature.bind("", None, **dict.fromkeys(takes), **args)
        if kind in CHECKS:
            CHECKS[kind](**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.terms.{term} of kind {kind!r} with args {args}: {error}") from error
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return Grader(function=function, args=args, takes=takes, is_async=is_async)


def _did_you_mean(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


REWARDS: dict[str, RewardFn] = {
    "math_answer": math_answer,
    "format": format_match,
}
"""kind -> reward function."""

CHECKS: dict[str, Callable[..., None]] = {
    "math_answer": check_math_answer,
    "format": check_format,
}
"""kind -> function of the config's args that raises ValueError on wrong ones and loads what grading needs, so that
neither is met within the time limit of a grading."""
