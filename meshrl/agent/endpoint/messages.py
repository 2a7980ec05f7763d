"""Anthropic's Messages, `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from meshrl.agent.endpoint import dialect
from meshrl.agent.endpoint.conversation import Ask, ModelReply, RefusedRequest
from meshrl.agent.endpoint.dialect import Body, Event, Parts, WireFormat
from meshrl.agent.parsing import as_object
from meshrl.data.chat import Message

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_IGNORED = ("thinking", "redacted_thinking")


def read(body: Body) -> Ask:
    system = dialect.text_of_content(body.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(dialect.objects(body, "messages", dialect.MAX_MESSAGES)):
        messages += _messages(message, f"messages[{i}]")
    return dialect.conversation(body, messages, _tool, "max_tokens", stop=dialect.texts(body, "stop_sequences"))


def _tool(tool: Body) -> dict[str, Any]:
    return dialect.function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


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
        function = call["function"]
        value = as_object(function["arguments"])  # `malformed` is an error for the tool
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": value})
    return blocks


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


async def stream(ask: Ask, reply_id: str, model: str, parts: Parts) -> AsyncIterator[list[Event]]:
    yield [_event("message_start", message=_message(reply_id, model))]
    num_sent = 0
    async for part in parts:
        if isinstance(part, str):
            start = [] if num_sent else [_start(0, {"type": "text", "text": ""})]
            num_sent += len(part)
            yield [*start, _delta(0, {"type": "text_delta", "text": part})]
            continue
        events, blocks = list[Event](), _blocks(part, num_sent)
        if num_sent:
            if blocks and blocks[0]["type"] == "text":
                events.append(_delta(0, {"type": "text_delta", "text": blocks.pop(0)["text"]}))
            events.append(_stop(0))
        for index, block in enumerate(blocks, 1 if num_sent else 0):
            events += _block(index, block)
        ending = {"stop_reason": _STOP[part.finish], "stop_sequence": None}
        yield [*events, _event("message_delta", delta=ending, usage=_usage(part)), _event("message_stop")]


def _block(index: int, block: Body) -> list[Event]:
    name = block["type"]
    empty: Body = {"input": {}} if name == "tool_use" else {name: ""}
    delta: Body = {"type": f"{name}_delta", name: block.get(name)}
    if name == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    return [_start(index, block | empty), _delta(index, delta), _stop(index)]


def _start(index: int, block: Body) -> Event:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, delta: Body) -> Event:
    return _event("content_block_delta", index=index, delta=delta)


def _stop(index: int) -> Event:
    return _event("content_block_stop", index=index)


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name} | fields


def error(status: int, message: str) -> Body:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = WireFormat(read=read, answer=answer, stream=stream, error=error)
