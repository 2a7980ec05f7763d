"""Clients of the endpoint in each dialect, for conversations in the form of Chat Completions, and a sampler that
answers with given texts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
from scripted_agent import scripted_context
from tiny_tokenizers import SHOWS_TOOLS, tiny_tokenizer

from meshrl.agent.endpoint.conversation import Conversation
from meshrl.agent.endpoint.server import Endpoint
from meshrl.agent.loop import AgentContext, start_trajectory
from meshrl.core.types import Prompt, Request, SamplingParams, Turn

KEY = "the key of this trajectory"
USER = {"role": "user", "content": "ab?"}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>'


class TextPolicy:
    """Samples these texts, one token for each letter, unlike the tokenizer's encoding, and then a stop token. answer:
    the text for a request."""

    def __init__(self, tokenizer: Any, answer: Callable[[Request], str]):
        self.tokenizer, self.answer, self.requests = tokenizer, answer, list[Request]()

    async def generate(self, request: Request) -> Turn:
        self.requests.append(request)
        text = self.answer(request)
        ids = [i for c in text for i in self.tokenizer(c, add_special_tokens=False).input_ids]
        ids.append(self.tokenizer.eos_token_id)
        is_cut = len(ids) > request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        return Turn(
            context_ids=request.context_ids,
            output_ids=np.array(ids, np.int32),
            logprobs=np.linspace(-0.5, -1.5, len(ids)).astype(np.float32),
            versions=np.full(len(ids), 3, np.int32),
            stop_reason="length" if is_cut else "stop",
            sampling=request.sampling,
            seed=request.seed,
        )


def answers(*texts: str) -> Callable[[Request], str]:
    remaining = list(texts)
    return lambda request: remaining.pop(0)


def endpoint_context(tokenizer: Any, **changes: Any) -> AgentContext:
    facts: dict[str, Any] = dict(
        tokenizer=tokenizer,
        sampling=SamplingParams(stop_token_ids=(2, 3)),
        max_new_tokens=200,
        max_context_tokens=4000,
    )
    return scripted_context(**{**facts, **changes})


@dataclass
class Served:
    """A conversation behind a server."""

    url: str
    conversation: Conversation
    policy: TextPolicy
    notes: list[str]


@asynccontextmanager
async def served(
    answer: Callable[[Request], str], prompt: Prompt | None = None, **changes: Any
) -> AsyncIterator[Served]:
    tokenizer, notes = tiny_tokenizer(SHOWS_TOOLS), list[str]()
    ctx = endpoint_context(tokenizer, **changes)
    policy = TextPolicy(tokenizer, answer)
    trajectory = start_trajectory(prompt or Prompt(id="p", ordinal=5, messages=[USER]), 0, ctx)
    conversation = Conversation(trajectory, policy.generate, ctx, notes.append)
    endpoint = Endpoint({KEY: conversation}.get, "policy", 4000, notes.append)
    async with endpoint.opened() as url:
        try:
            yield Served(url, conversation, policy, notes)
        finally:
            await conversation.close()


async def send(url: str, path: str, body: Any, key: str = KEY) -> httpx2.Response:
    async with httpx2.AsyncClient(trust_env=False, timeout=20) as client:
        return await client.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"})


def events_of(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


async def chat(url: str, messages: list[dict[str, Any]], tools: list[Any], stream: bool) -> dict[str, Any]:
    """The assistant's message."""
    body = {"messages": messages, "tools": tools, "stream": stream}
    answer = await send(url, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return dict(answer.json()["choices"][0]["message"])
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for event in events_of(answer.text):
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            message.setdefault("tool_calls", []).append({k: call[k] for k in ("id", "type", "function")})
    return message


async def messages(url: str, conversation: list[dict[str, Any]], tools: list[Any], stream: bool) -> dict[str, Any]:
    sent = []
    for m in conversation:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": m["content"]}] if m.get("content") else []
        if m["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": blocks}]
        for call in m.get("tool_calls", ()):
            of = call["function"]
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": of["name"], "input": json.loads(of["arguments"])}
            )
        sent.append({"role": "user" if m["role"] == "tool" else m["role"], "content": blocks})
    described = [
        {"name": t["function"]["name"], "input_schema": t["function"]["parameters"], "description": ""} for t in tools
    ]
    body = {"model": "m", "max_tokens": 200, "messages": sent, "tools": described, "stream": stream}
    answer = await send(url, "/v1/messages", body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["content"] if not stream else _blocks(events_of(answer.text))
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in found:
        if block["type"] == "text":
            message["content"] += block["text"]
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
    return message


def _blocks(events: list[Any]) -> list[Any]:
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[event["index"]]["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                blocks[event["index"]]["input"] = json.loads(delta["partial_json"])
    return blocks


async def responses(url: str, conversation: list[dict[str, Any]], tools: list[Any], stream: bool) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for m in conversation:
        if m["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": m["tool_call_id"], "output": m["content"]})
            continue
        if m.get("content"):
            items.append({"role": m["role"], "content": m["content"]})
        for call in m.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    described = [{"type": "function", **tool["function"]} for tool in tools]
    answer = await send(url, "/v1/responses", {"input": items, "tools": described, "stream": stream})
    assert answer.status_code == 200, answer.text
    if stream:
        events = events_of(answer.text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        complete = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == complete["output"]
        texts = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert texts == "".join(p["text"] for i in done if i["type"] == "message" for p in i["content"])
    else:
        complete = answer.json()
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in complete["output"]:
        if item["type"] == "message":
            message["content"] += item["content"][0]["text"]
        elif item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message


DIALECTS = {"chat": chat, "messages": messages, "responses": responses}
