"""What the dialects of the endpoint share: how a request is read, and how settings are used, replaced or refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshrl.agent.endpoint.conversation import Ask, ModelReply, RefusedRequest
from meshrl.agent.parsing import as_value, function_call
from meshrl.data.chat import Message

Body = dict[str, Any]
Event = tuple[str | None, Any]
"""The name of a server-sent event, if the dialect names them, and its JSON, or a text."""

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_DEPTH = 64
ROLES = ("system", "developer", "user", "assistant", "tool")

REPLACED = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
"""Settings of a client that training replaces by the run's, and that `meshrl serve` uses."""

MUST_BE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "echo": (False,),
    "prompt_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
}
"""Settings that would change what is sampled or returned, and the values besides null that a client may give. Others
that are not read have no effect on sampling, such as `user` and `metadata`, and are accepted."""


Parts = AsyncIterator[str | ModelReply]


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """A dialect: how its requests are read and its answers are written.

    read: Raises RefusedRequest. answer: of (request, reply, name of the model). stream: events of a streamed answer,
    of (request, id, name of the model, parts): parts of the text as they are sampled, if any, and then the reply.
    error: the body of a refusal, of (status, message). done: the last event of a stream, a text.
    """

    read: Callable[[Body], Ask]
    answer: Callable[[Ask, ModelReply, str], Body]
    stream: Callable[[Ask, str, str, Parts], AsyncIterator[list[Event]]]
    error: Callable[[int, str], Body]
    done: str | None = None


def require_allowed(body: Body) -> None:
    """Raises: RefusedRequest for a setting that the endpoint can't follow."""
    for name, allowed in MUST_BE.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            values = ", ".join(json.dumps(each) for each in allowed) or "none"
            raise RefusedRequest(400, f"{name} is {json.dumps(value):.80}; allowed: {values}")


def sampling_of(body: Body) -> dict[str, float]:
    """What the client asked for of REPLACED."""
    found = {name: number(body, name) for name in REPLACED if body.get(name) is not None}
    for name in ("top_k", "seed"):
        if not isinstance(found.get(name, 0), int):
            raise RefusedRequest(400, f"{name} is {found[name]}; it must be an integer")
    return found


def number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        raise RefusedRequest(400, f"{name} is {value!r:.80}; it must be a number")
    return value


def count(body: Body, *names: str) -> int | None:
    """The first of these settings that is given, which must be a positive integer."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RefusedRequest(400, f"{name} is {value!r:.80}; it must be an integer of at least 1")
            return value
    return None


def texts(body: Body, name: str) -> tuple[str, ...]:
    """A setting that is a text or a list of texts; empty texts are refused."""
    value = body.get(name) or []
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > 64 or not all(isinstance(t, str) and t for t in listed):
        raise RefusedRequest(400, f"{name} is {value!r:.80}; it must be a text, or a list of at most 64 texts")
    return tuple(listed)


def objects(body: Body, name: str, most: int) -> list[Body]:
    """A setting that is a list of objects."""
    value = body.get(name) or []
    if not isinstance(value, list) or len(value) > most or not all(isinstance(each, dict) for each in value):
        raise RefusedRequest(400, f"{name} is {value!r:.80}; it must be a list of at most {most} objects")
    return value


def text_of_content(content: Any, place: str) -> str:
    """The text of a message's content: a text, null, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    found = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(part.get("text", ""), str):
            raise RefusedRequest(400, f"{place}: content of type {kind!r:.80}; this endpoint takes text only")
        found.append(part.get("text", ""))
    return "".join(found)


def conversation(
    body: Body, messages: list[Message], tool: Callable[[Body], dict[str, Any]], *limits: str, **more: Any
) -> Ask:
    """The request with these messages. tool: reads one of its tools. limits: settings of the most tokens, of which the
    first one is used. more: fields of Ask. Raises: RefusedRequest."""
    require_allowed(body)
    tools = [tool(each) for each in objects(body, "tools", MAX_TOOLS)]
    if not messages:
        raise RefusedRequest(400, "messages is empty; give at least one message")
    if messages[-1]["role"] == "assistant":
        raise RefusedRequest(400, "the last message is the assistant's; an answer can't be continued here")
    return Ask(
        messages=messages,
        tools=[] if body.get("tool_choice") in ("none", {"type": "none"}) else tools,
        max_tokens=count(body, *limits),
        sampling=sampling_of(body),
        stream=bool(body.get("stream")),
        **more,
    )


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as chat templates get it."""
    if not isinstance(name, str) or not name:
        raise RefusedRequest(400, f"a tool has the name {name!r:.80}; it must be a text")
    if not isinstance(parameters or {}, dict) or not isinstance(description or "", str):
        raise RefusedRequest(
            400, f"the tool {name!r:.80} has parameters {parameters!r:.80}; they must be a JSON schema"
        )
    body = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": body}


def call_of(call_id: Any, name: Any, arguments: Any, place: str) -> Body:
    """A call of a message, with its arguments as values where their text is JSON."""
    if not isinstance(name, str):
        raise RefusedRequest(400, f"{place}: a call of the function {name!r:.80}; it must be a text")
    return function_call(call_id, name, as_value(arguments))


def require_shallow(body: Any) -> None:
    """Raises: RefusedRequest for JSON with deeper lists and objects than any client needs."""
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [
            each
            for value in level
            for each in (value.values() if isinstance(value, dict) else value)
            if isinstance(each, dict | list)
        ]
        if not level:
            return
    raise RefusedRequest(400, f"the body has more than {MAX_DEPTH} levels of lists and objects")
