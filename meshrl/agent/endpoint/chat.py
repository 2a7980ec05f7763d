"""OpenAI's Chat Completions, `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from meshrl.agent.endpoint import dialect
from meshrl.agent.endpoint.conversation import Ask, ModelReply, RefusedRequest
from meshrl.agent.endpoint.dialect import Body, Event, Parts, WireFormat
from meshrl.data.chat import Message


def read(body: Body) -> Ask:
    listed, options = dialect.objects(body, "messages", dialect.MAX_MESSAGES), body.get("stream_options")
    return dialect.conversation(
        body,
        [_message(each, f"messages[{i}]") for i, each in enumerate(listed)],
        _tool,
        "max_completion_tokens",
        "max_tokens",
        stop=dialect.texts(body, "stop"),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
    )


def _tool(tool: Body) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise RefusedRequest(400, f"a tool is {json.dumps(tool):.80}; its type must be function")
    return dialect.function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _message(message: Body, place: str) -> Message:
    role = message.get("role")
    if role not in dialect.ROLES:
        raise RefusedRequest(400, f"{place}: role is {role!r:.80}; allowed: {', '.join(dialect.ROLES)}")
    made: Message = {
        "role": "system" if role == "developer" else role,
        "content": dialect.text_of_content(message.get("content"), f"{place}.content"),
    }
    if role == "assistant" and (calls := dialect.objects(message, "tool_calls", dialect.MAX_TOOLS)):
        made["tool_calls"] = []
        for call in calls:
            function = call.get("function")
            of = function if isinstance(function, dict) else {}
            made["tool_calls"].append(dialect.call_of(call.get("id"), of.get("name"), of.get("arguments"), place))
    for name in ("tool_call_id", "name", "reasoning_content"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    return made


def usage_of(reply: ModelReply) -> Body:
    sampled, cached = len(reply.turn.output_ids), reply.turn.times.cached_tokens
    return {
        "prompt_tokens": reply.num_context,
        "completion_tokens": sampled,
        "total_tokens": reply.num_context + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _choice(ask: Ask, reply: ModelReply) -> Body:
    message = {"role": "assistant", "content": reply.message["content"] or None}
    message |= {name: reply.message[name] for name in ("reasoning_content", "tool_calls") if reply.message.get(name)}
    return {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": _logprobs(ask, reply)}


def _logprobs(ask: Ask, reply: ModelReply) -> Body | None:
    if not ask.logprobs:
        return None
    pairs = zip(reply.tokens, reply.turn.logprobs.tolist(), strict=True)
    content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]
    return {"content": content, "refusal": None}


def answer(ask: Ask, reply: ModelReply, model: str) -> Body:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion",
        "created": reply.created,
        "model": model,
        "choices": [_choice(ask, reply)],
        "usage": usage_of(reply),
    }


async def stream(ask: Ask, reply_id: str, model: str, parts: Parts) -> AsyncIterator[list[Event]]:
    head = {"id": f"chatcmpl-{reply_id}", "object": "chat.completion.chunk", "created": 0, "model": model}

    def chunk(delta: Body, **choice: Any) -> Event:
        return None, head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None} | choice]}

    yield [chunk({"role": "assistant", "content": ""})]
    num_sent = 0
    async for part in parts:
        if isinstance(part, str):
            num_sent += len(part)
            yield [chunk({"content": part})]
            continue
        message, rest = part.message, part.message["content"][num_sent:]
        deltas = [{"reasoning_content": message["reasoning_content"]}] if message.get("reasoning_content") else []
        deltas += [{"content": rest}] if rest else []
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls") or ())]
        events = [chunk(delta) for delta in deltas]
        events.append(chunk({}, finish_reason=part.finish, logprobs=_logprobs(ask, part)))
        if ask.usage:
            events.append((None, head | {"choices": [], "usage": usage_of(part)}))
        yield events


def error(status: int, message: str) -> Body:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "context_length_exceeded" if "context_length_exceeded" in message else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


CHAT = WireFormat(read=read, answer=answer, stream=stream, error=error, done="[DONE]")
