"""OpenAI's Responses, `POST /v1/responses`, without stored state: a client sends its complete conversation."""

from __future__ import annotations

from typing import Any

from meshrl.agent.endpoint import chat, dialect
from meshrl.agent.endpoint.conversation import Ask, ModelReply, RefusedRequest
from meshrl.agent.endpoint.dialect import Body, Event, WireFormat
from meshrl.data.chat import Message


def read(body: Body) -> Ask:
    dialect.require_allowed(body)
    style = body.get("text")
    if isinstance(style, dict):
        dialect.require_allowed({"response_format": style.get("format")})
    given = body.get("input")
    items = (
        [{"role": "user", "content": given}]
        if isinstance(given, str)
        else dialect.objects(body, "input", dialect.MAX_MESSAGES)
    )
    instructions = dialect.text_of_content(body.get("instructions"), "instructions")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    tools = [_tool(each) for each in dialect.objects(body, "tools", dialect.MAX_TOOLS)]
    return Ask(
        messages=dialect.require_conversation(messages),
        tools=dialect.chosen(body, tools),
        max_tokens=dialect.count(body, "max_output_tokens"),
        sampling=dialect.sampling_of(body),
        stream=bool(body.get("stream")),
        usage=True,
    )


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
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
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


class ResponseStream:
    """AnswerStream of numbered events."""

    def __init__(self, ask: Ask, reply_id: str, model: str):
        self._ask, self._id, self._model, self._sent, self._number = ask, reply_id, model, "", 0

    def begin(self) -> list[Event]:
        response = _response(self._id, self._model, "in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def text(self, part: str) -> list[Event]:
        start = [] if self._sent else self._start_text(0)
        self._sent += part
        return [*start, self._of_text("response.output_text.delta", 0, delta=part, logprobs=[])]

    def end(self, reply: ModelReply) -> list[Event]:
        events: list[Event] = []
        complete = answer(self._ask, reply, self._model) | {"id": f"resp_{self._id}"}
        for index, item in enumerate(complete["output"]):
            if item["type"] == "message":
                events += self._text_item(index, item)
            else:
                events += self._item(index, item)
        name = "incomplete" if complete["status"] == "incomplete" else "completed"
        return [*events, self._event(f"response.{name}", response=complete)]

    def _text_item(self, index: int, item: Body) -> list[Event]:
        text = item["content"][0]["text"]
        item["id"] = f"msg_{self._id}"
        return [
            *([] if self._sent else self._start_text(index)),
            self._of_text("response.output_text.delta", index, delta=text[len(self._sent) :], logprobs=[]),
            self._of_text("response.output_text.done", index, text=text, logprobs=[]),
            self._of_text("response.content_part.done", index, part=_part(text)),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _item(self, index: int, item: Body) -> list[Event]:
        """A call, or reasoning."""
        is_call = item["type"] == "function_call"
        empty: Body = {"arguments": "", "status": "in_progress"} if is_call else {"content": []}
        events = [self._event("response.output_item.added", output_index=index, item=item | empty)]
        if is_call:
            place = {"output_index": index, "item_id": item["id"]}
            name, arguments = item["name"], item["arguments"]
            events.append(self._event("response.function_call_arguments.delta", **place, delta=arguments))
            events.append(self._event("response.function_call_arguments.done", **place, name=name, arguments=arguments))
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _start_text(self, index: int) -> list[Event]:
        item = _text_item(self._id, "", "in_progress")
        return [
            self._event("response.output_item.added", output_index=index, item=item),
            self._of_text("response.content_part.added", index, part=_part("")),
        ]

    def _of_text(self, name: str, index: int, **fields: Any) -> Event:
        return self._event(name, item_id=f"msg_{self._id}", output_index=index, content_index=0, **fields)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1} | fields


RESPONSES = WireFormat(read=read, answer=answer, stream=ResponseStream, error=chat.error)
