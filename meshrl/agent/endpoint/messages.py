"""Anthropic's Messages, `POST /v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from meshrl.agent.endpoint import dialect
from meshrl.agent.endpoint.conversation import Ask, ModelReply, RefusedRequest
from meshrl.agent.endpoint.dialect import Body, Event, WireFormat
from meshrl.data.chat import Message

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_IGNORED = ("thinking", "redacted_thinking")


def read(body: Body) -> Ask:
    dialect.require_allowed(body)
    tools = [
        dialect.function_tool(each.get("name"), each.get("description"), each.get("input_schema"))
        for each in dialect.objects(body, "tools", dialect.MAX_TOOLS)
    ]
    system = dialect.text_of_content(body.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(dialect.objects(body, "messages", dialect.MAX_MESSAGES)):
        messages += _messages(message, f"messages[{i}]")
    return Ask(
        messages=dialect.require_conversation(messages),
        tools=dialect.chosen(body, tools),
        max_tokens=dialect.count(body, "max_tokens"),
        stop=dialect.texts(body, "stop_sequences"),
        sampling=dialect.sampling_of(body),
        stream=bool(body.get("stream")),
        usage=True,
    )


def _messages(message: Body, place: str) -> list[Message]:
    """A message's results of tools are messages of their own, before its text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RefusedRequest(400, f"{place}: role is {role!r:.80}; allowed: user, assistant")
    blocks = (
        [{"type": "text", "text": content}]
        if isinstance(content, str)
        else dialect.objects(message, "content", dialect.MAX_TOOLS)
    )
    results, calls, plain = list[Message](), list[Body](), list[Body]()
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            calls.append(dialect.call_of(block.get("id"), block.get("name"), block.get("input"), place))
        elif kind == "tool_result" and role == "user":
            text = dialect.text_of_content(block.get("content"), f"{place}: tool_result")
            results.append({"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id")})
        elif kind not in _IGNORED:
            plain.append(block)
    made: Message = {"role": role, "content": dialect.text_of_content(plain, place)}
    if calls:
        made["tool_calls"] = calls
    return results if results and not plain else [*results, made]


def _usage(reply: ModelReply) -> Body:
    cached = reply.turn.times.cached_tokens
    return {
        "input_tokens": reply.num_context - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(reply.turn.output_ids),
    }


def _blocks(reply: ModelReply, num_sent: int = 0) -> list[Body]:
    """num_sent: characters of the text that are left out."""
    message, text = reply.message, reply.message["content"][num_sent:]
    blocks: list[Body] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    blocks += [{"type": "text", "text": text}] if text else []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": _object(arguments)})
    return blocks


def _object(arguments: str) -> Body:
    """The arguments of a call; a text that is no JSON object is the value of `malformed`, for an error of the tool."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"malformed": arguments}


def _message(reply_id: str, model: str, **filled: Any) -> Body:
    empty: Body = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": model} | empty | filled


def answer(ask: Ask, reply: ModelReply, model: str) -> Body:
    return _message(reply.id, model, content=_blocks(reply), stop_reason=_STOP[reply.finish], usage=_usage(reply))


class MessageStream:
    """AnswerStream of blocks."""

    def __init__(self, ask: Ask, reply_id: str, model: str):
        self._id, self._model, self._num_sent, self._index = reply_id, model, 0, 0

    def begin(self) -> list[Event]:
        return [_event("message_start", message=_message(self._id, self._model))]

    def text(self, part: str) -> list[Event]:
        start = [] if self._num_sent else self._start({"type": "text", "text": ""})
        self._num_sent += len(part)
        return [*start, self._delta({"type": "text_delta", "text": part})]

    def end(self, reply: ModelReply) -> list[Event]:
        events: list[Event] = []
        blocks = _blocks(reply, self._num_sent)
        if self._num_sent:
            if blocks and blocks[0]["type"] == "text":
                events.append(self._delta({"type": "text_delta", "text": blocks.pop(0)["text"]}))
            events += self._stop()
        for block in blocks:
            events += self._block(block)
        ending = {"stop_reason": _STOP[reply.finish], "stop_sequence": None}
        return [*events, _event("message_delta", delta=ending, usage=_usage(reply)), _event("message_stop")]

    def _block(self, block: Body) -> list[Event]:
        if block["type"] == "tool_use":
            start, delta = (
                block | {"input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        else:
            name = block["type"]
            start, delta = block | {name: ""}, {"type": f"{name}_delta", name: block[name]}
        return [*self._start(start), self._delta(delta), *self._stop()]

    def _start(self, block: Body) -> list[Event]:
        return [_event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: Body) -> Event:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> list[Event]:
        self._index += 1
        return [_event("content_block_stop", index=self._index - 1)]


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name} | fields


def error(status: int, message: str) -> Body:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = WireFormat(read=read, answer=answer, stream=MessageStream, error=error)
