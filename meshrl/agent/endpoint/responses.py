"""OpenAI's Responses, `POST /v1/responses`, without stored state: a client sends its complete conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from meshrl.agent.endpoint import chat, dialect
from meshrl.agent.endpoint.conversation import Ask, ModelReply, RefusedRequest
from meshrl.agent.endpoint.dialect import Body, Event, Parts, WireFormat
from meshrl.data.chat import Message


def read(body: Body) -> Ask:
    style, given = body.get("text"), body.get("input")
    if isinstance(style, dict):
        dialect.require_allowed({"response_format": style.get("format")})
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    instructions = dialect.text_of_content(body.get("instructions"), "instructions")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(dialect.objects({"input": given}, "input", dialect.MAX_MESSAGES)):
        _add(messages, item, f"input[{i}]")
    return dialect.conversation(body, messages, _tool, "max_output_tokens")


def _tool(tool: Body) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RefusedRequest(400, f"a tool has the type {tool.get('type')!r:.80}; allowed: function")
    return dialect.function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _add(messages: list[Message], item: Body, place: str) -> None:
    """Add an item. The text and the calls of one answer are separate items, and one message."""
    kind, role = item.get("type", "message"), item.get("role")
    follows = bool(messages) and messages[-1]["role"] == "assistant"
    if kind == "reasoning":
        return
    if kind == "function_call":
        call = dialect.call_of(item.get("call_id"), item.get("name"), item.get("arguments"), place)
        if not follows:
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = dialect.text_of_content(item.get("output"), place)
        messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
    elif kind == "message" and role in dialect.ROLES:
        text = dialect.text_of_content(item.get("content"), place)
        if role == "assistant" and follows and not messages[-1].get("tool_calls"):
            messages[-1]["content"] += text
        else:
            messages.append({"role": "system" if role == "developer" else role, "content": text})
    else:
        raise RefusedRequest(400, f"{place}: an item of type {kind!r:.80} with role {role!r:.80} can't be used here")


def _output(reply: ModelReply) -> list[Body]:
    message = reply.message
    items: list[Body] = []
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": content})
    if message["content"] or not message.get("tool_calls"):
        items.append(_text_item(reply.id, message["content"], "completed"))
    for i, call in enumerate(message.get("tool_calls") or ()):
        items.append(
            {
                "id": f"fc_{reply.id}_{i}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return items


def _text_item(reply_id: str, text: str, status: str) -> Body:
    content = [_part(text)] if status == "completed" else []
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(reply_id: str, model: str, status: str, **filled: Any) -> Body:
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "model": model,
        "output": [],
        **dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p", "usage")),
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    } | filled


def answer(ask: Ask, reply: ModelReply, model: str) -> Body:
    is_cut, sampled = reply.finish == "length", len(reply.turn.output_ids)
    usage = {
        "input_tokens": reply.num_context,
        "input_tokens_details": {"cached_tokens": reply.turn.times.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_context + sampled,
    }
    return _response(
        reply.id,
        model,
        "incomplete" if is_cut else "completed",
        created_at=reply.created,
        output=_output(reply),
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        usage=usage,
    )


async def stream(ask: Ask, reply_id: str, model: str, parts: Parts) -> AsyncIterator[list[Event]]:
    numbers, message_id, num_sent = count(), f"msg_{reply_id}", 0

    def event(kind: str, /, **fields: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(numbers)} | fields

    def of_text(name: str, index: int, **fields: Any) -> Event:
        return event(f"response.{name}", item_id=message_id, output_index=index, content_index=0, **fields)

    def start_text(index: int) -> list[Event]:
        item = _text_item(reply_id, "", "in_progress")
        added = event("response.output_item.added", output_index=index, item=item)
        return [added, of_text("content_part.added", index, part=_part(""))]

    response = _response(reply_id, model, "in_progress")
    yield [event(f"response.{name}", response=response) for name in ("created", "in_progress")]
    async for part in parts:
        if isinstance(part, str):
            start = [] if num_sent else start_text(0)
            num_sent += len(part)
            yield [*start, of_text("output_text.delta", 0, delta=part, logprobs=[])]
            continue
        events: list[Event] = []
        complete = answer(ask, part, model) | {"id": f"resp_{reply_id}"}
        for index, item in enumerate(complete["output"]):
            kind = item["type"]
            if kind == "message":
                text, item["id"] = item["content"][0]["text"], message_id
                events += [] if num_sent else start_text(index)
                events.append(of_text("output_text.delta", index, delta=text[num_sent:], logprobs=[]))
                events.append(of_text("output_text.done", index, text=text, logprobs=[]))
                events.append(of_text("content_part.done", index, part=_part(text)))
            else:
                is_call = kind == "function_call"
                empty: Body = {"arguments": "", "status": "in_progress"} if is_call else {"content": []}
                events.append(event("response.output_item.added", output_index=index, item=item | empty))
                if is_call:
                    place = {"output_index": index, "item_id": item["id"]}
                    name, arguments = item["name"], item["arguments"]
                    events.append(event("response.function_call_arguments.delta", **place, delta=arguments))
                    events.append(
                        event("response.function_call_arguments.done", **place, name=name, arguments=arguments)
                    )
            events.append(event("response.output_item.done", output_index=index, item=item))
        yield [*events, event(f"response.{complete['status']}", response=complete)]


RESPONSES = WireFormat(read=read, answer=answer, stream=stream, error=chat.error)
