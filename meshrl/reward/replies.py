"""Replies of a reward worker, and exceptions of user code as one line. User code runs in the worker and may write to
its socket, so each reply repeats the secret name of its request."""

from __future__ import annotations

import os
import sysconfig
import traceback
from typing import Any

from meshrl.core.files import decode, parse_json

MAX_MESSAGE_CHARS = 400
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


def parse_reply(data: bytes, request: str) -> dict[str, Any]:
    """request: the random name of the request, which user code does not see: a reply without it is no reply to this
    request. Raises: ValueError."""
    reply = parse_json(decode(data), constants=False)
    if not isinstance(reply, dict) or reply.get("request") != request:
        raise ValueError(f"a reply is not to the current request: {data!r:.200}")
    return reply


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
