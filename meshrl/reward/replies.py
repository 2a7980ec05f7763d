"""Replies of a reward worker, checked. User code runs in the worker and may write to its socket, so nothing in a reply
is trusted: each repeats the secret name of its request, and the functions raise ValueError for a reply that the
worker's own code does not send."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from meshrl.core.errors import Failure, Graded
from meshrl.core.files import decode, parse_json

MAX_MESSAGE_CHARS = 400
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_KINDS = ("bad_value", "crash", "judge", "memory", "timeout")  # of failures that a worker reports


@dataclass(frozen=True, slots=True)
class Ready:
    """The first reply. error: why the worker can't grade; then it has ended."""

    async_terms: frozenset[str] = frozenset()
    cpu_limited_terms: frozenset[str] = frozenset()
    terms_of_tokens: frozenset[str] = frozenset()
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The result of one item of a batch. retire: do not use the process again."""

    item: int
    result: Graded
    retire: bool


def parse_ready(data: bytes, request: str, terms: Collection[str]) -> Ready:
    """request: as in parse_reply. terms: the names of the config."""
    match _reply_to(data, request):
        case {"config_error": str(error)} if error:
            return Ready(error=error)
        case {"async": list(is_async), "cpu_limited": list(limited), "of_tokens": list(of_tokens)}:
            if all(isinstance(term, str) and term in terms for term in [*is_async, *limited, *of_tokens]):
                return Ready(frozenset(is_async), frozenset(limited), frozenset(of_tokens))
    raise ValueError(f"its first reply is {data!r:.200}; it should name the terms that it has loaded")


def parse_reply(data: bytes, request: str, open_items: Collection[int], max_reward: float) -> Reply:
    """request: the random name of the request, which user code does not see: a reply without it is no reply to this
    request. open_items: those that may be answered next."""
    reply = _reply_to(data, request)
    item = reply.get("item")
    if type(item) is not int or item not in open_items:
        raise ValueError(f"a reply is to item {item!r:.40}, which is not open")
    match reply:
        case {"failure": [str(kind), str(message)]} if kind in _KINDS:
            result: Graded = Failure(kind=kind, message=one_line(message))
        case {"value": int() | float() as value} if type(value) is not bool:
            if not abs(value) <= max_reward:  # also for NaN
                raise ValueError(f"a reply has the value {value!r:.40}; allowed: at most {max_reward:g} in size")
            result = float(value)
        case {"value": None}:
            result = None
        case _:
            raise ValueError(f"a reply has neither a number nor a failure of a known kind: {data!r:.200}")
    return Reply(item=item, result=result, retire=bool(reply.get("retire")))


def one_line(text: str) -> str:
    """The text as a message of a Failure: valid Unicode in one line of at most MAX_MESSAGE_CHARS characters."""
    return " ".join(text.encode(errors="replace").decode().split())[:MAX_MESSAGE_CHARS]


def error_line(error: BaseException) -> str:
    """An exception of a user's function as a message of a Failure, with the last file and line of the user's code: not
    of a library that it calls, unless there are no others."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_PACKAGE, "<frozen"))]
    users = [f for f in frames if not f.filename.startswith(_LIBRARIES) and "-packages" + os.sep not in f.filename]
    place = "".join(f" at {f.filename}:{f.lineno}" for f in (users or frames)[-1:])
    return one_line(f"{error_text(error)}{place}")


def error_text(error: BaseException) -> str:
    """The type and the text of an exception of a user's function, whose __str__ may be the user's code, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as cause:
        return f"{type(error).__name__} (its __str__ raised {type(cause).__name__})"


def _reply_to(data: bytes, request: str) -> dict[str, Any]:
    reply = parse_json(decode(data), constants=False)
    if not isinstance(reply, dict) or reply.get("request") != request:
        raise ValueError(f"a reply is not to the current request: {data!r:.200}")
    return reply
