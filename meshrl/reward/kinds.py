"""From a reward's `kind` in the config to its function: that of an entry in config/kinds.py, or a user's.

A reward function takes `(completion: str, answer, **keywords)` and returns a number of at most 1e12 in size, or None if
the term does not apply to the row; it may be `async`. What it changes in its arguments, no other call sees. It gets
those of these keywords that its signature has:

    prompt      dict: id, messages, env, meta of the prompt
    messages    list of every parsed message of the trajectory's turns, in order
    stop_reason why the last turn ended: stop | length | context
    num_tokens  number of tokens sampled in all turns of the trajectory
    raw         text of the last turn with all special tokens; the completion lacks those that end the turn
    tokens      list of the ids sampled in the last turn

and the `args` of its config entry. A function with the parameters solution_str and ground_truth is called as verl calls
it, and may return a dict with the number as "score".

This file imports the standard library only: it runs in the workers.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from meshrl.config.kinds import REWARDS
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import did_you_mean, import_object, look_up

MAX_TOKENS = 1 << 20  # a completion of max_tokens is made at the start, to test the penalty


def format_match(completion: str, answer: Any, *, regex: str, where: str = "full") -> float:
    """1.0 when the stripped completion matches `regex`, else 0.0. The reference answer is not used.

    regex: Python syntax; begin with (?s) if `.` should also match line breaks.
    where: `full` = from the first to the last character, `anywhere` = some part of it.

    Example: format_match("<think>2+2</think> 4", None, regex="(?s)<think>.*</think> [0-9]+") is 1.0.

    Raises: ValueError for an invalid `regex` or `where`.
    """
    if where not in ("full", "anywhere"):
        raise ValueError(f"where is {where!r}; allowed: full, anywhere")
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise ValueError(f"regex {regex!r} is not valid: {error}") from error
    text = completion.strip()
    return 1.0 if (pattern.fullmatch(text) if where == "full" else pattern.search(text)) else 0.0


def overlong(completion: str, answer: Any, *, num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft punishment of long completions, -1.0 to 0.0: 0.0 up to max_tokens - buffer_tokens, then lower by
    1 / buffer_tokens for each token, and -1.0 from max_tokens on.

    num_tokens: of all turns of the trajectory. max_tokens: in most cases rollout.sampling.max_new_tokens.

    Raises: ValueError unless 1 <= buffer_tokens <= max_tokens <= MAX_TOKENS.
    Source: Yu et al. 2025 (DAPO), equation 13.
    """
    for name, value in {"max_tokens": max_tokens, "buffer_tokens": buffer_tokens}.items():
        if type(value) is not int or not 1 <= value <= MAX_TOKENS:
            raise ValueError(f"{name} is {value!r}; it must be an integer from 1 to {MAX_TOKENS}")
    if buffer_tokens > max_tokens:
        raise ValueError(f"buffer_tokens is {buffer_tokens}; it must be at most max_tokens = {max_tokens}")
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - num_tokens) / buffer_tokens))


OF_TOKENS = ("raw", "tokens")  # only for functions that name them, because they double the size of a grading
OFFERED = ("prompt", "messages", "stop_reason", "num_tokens", *OF_TOKENS)

RewardFn = Callable[..., Any]

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The parameters of a reward function of verl."""
_LISTS = ("queries", "prompts", "completions", "solution_strs", "ground_truths")  # of a batch, in other frameworks
_CALL = (
    "the call is function(completion, answer, **keywords): the text of one completion, the answer of its row, those of "
    f"the keywords {', '.join(OFFERED)} that are parameters of the function, and the args of the config; it returns a "
    "number"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grader:
    """A reward function with its config arguments, and the names of OFFERED keywords that it takes. verl: the names
    in VERL that it takes; empty = its first two arguments are the completion and the answer."""

    function: RewardFn
    args: dict[str, Any]
    takes: tuple[str, ...]
    verl: tuple[str, ...]
    is_async: bool

    def __call__(self, payload: dict[str, Any]) -> Any:
        """Call the function with copies, because the items of a batch and all calls share objects. payload:
        completion, answer and the values of the keywords in `takes`."""
        payload, args = copy.deepcopy((payload, self.args))
        keywords = {name: payload[name] for name in self.takes} | args
        if not self.verl:
            return self.function(payload["completion"], payload["answer"], **keywords)
        prompt = payload["prompt"]
        values = {
            "data_source": prompt["meta"].get("data_source", prompt["env"]),
            "solution_str": payload["completion"],
            "ground_truth": payload["answer"],
            "extra_info": prompt["meta"].get("extra_info", {}),
        }
        result = self.function(**{name: values[name] for name in self.verl}, **keywords)
        return _awaited_score(result) if self.is_async else _plain_score(result)


async def _awaited_score(result: Awaitable[Any]) -> Any:
    return _plain_score(await result)


def _plain_score(result: Any) -> Any:
    return result["score"] if isinstance(result, dict) and "score" in result else result


def make_grader(
    term: str, kind: str, args: dict[str, Any], pickled: bytes | None = None, given: Callable[..., Any] | None = None
) -> Grader:
    """The grader of a config entry, whose function accepts the arguments of a grading. kind: a name in REWARDS, or a
    dotted path `package.module:function`.

    pickled, given: the function itself, if a Python caller gave one; `kind` is then only its name.
    """
    function: Any
    if pickled is not None:
        function = _unpickled(term, kind, pickled)
    elif given is not None:
        function = given
    else:
        function = import_object(REWARDS[kind].function) if kind in REWARDS else look_up(kind, REWARDS, "reward kind")
    try:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        is_verl = {"solution_str", "ground_truth"} <= set(signature.parameters)
        verl = tuple(p for p in VERL if is_verl and p not in args and (open_ended or p in signature.parameters))
        first = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
        lists = [name for name in signature.parameters if name in _LISTS]
        if not is_verl and lists and first[:1] != ["completion"]:
            answers = ", answer=[answer]" if "answer" in signature.parameters else ""
            raise TypeError(
                f"the function takes {', '.join(lists)} as the lists of a batch, but a call here has one completion. "
                "For a function of TRL write `def score(completion, answer, prompt): return trl_function(prompts=["
                f"prompt['messages']], completions=[[{{'role': 'assistant', 'content': completion}}]]{answers})[0]`"
            )
        has_both = len(first) == 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if not is_verl and (not has_both or "completion" in first[1:] or set(first) & set(OFFERED)):
            raise TypeError(
                f"the first two arguments are the completion and the answer, in this order; this function has {first}. "
                f"Write `def {getattr(function, '__name__', 'score')}(completion, answer, ...)`, also where it reads "
                "no answer"
            )
        answered = {"solution_str", "ground_truth"} if is_verl else set(first)
        named = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        accepted = [name for name in named if name not in answered]
        unknown = [] if open_ended else [name for name in args if name not in accepted]
        if unknown:
            settable = [name for name in accepted if name not in OFFERED]
            raise TypeError(
                f"no argument {unknown[0]!r}; allowed: {', '.join(settable) or 'none'}"
                f"{did_you_mean(unknown[0], settable)}"
            )
        read = {*accepted, *({*OFFERED} - {*OF_TOKENS} if open_ended else ())}
        takes = tuple(name for name in OFFERED if name in read and name not in args)
        signature.bind(*() if is_verl else ("", None), **dict.fromkeys((*verl, *takes)), **args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.terms.{term} of kind {kind!r} with args {args}: {error}; {_CALL}") from error
    try:
        if kind in REWARDS:
            import_object(REWARDS[kind].check)("", None, **dict.fromkeys(takes, 0) | args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.terms.{term} of kind {kind!r} with args {args}: {error}") from error
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return Grader(function=function, args=args, takes=takes, verl=verl, is_async=is_async)


def _unpickled(term: str, kind: str, pickled: bytes) -> RewardFn:
    try:
        return pickle.loads(pickled)
    except MemoryError:
        raise  # not a fault of the function
    except Exception as error:  # user code: its imports may raise anything
        raise ConfigError(
            f"reward.terms.{term}: the function {kind} can't be loaded in a worker process: {type(error).__name__}: "
            f"{error}; its modules are looked for in the working folder and on sys.path"
        ) from error
