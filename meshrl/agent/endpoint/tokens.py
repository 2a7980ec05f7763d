"""The token route, `POST /inference/v1/generate`: ids in, ids and logprobs out, as vLLM's endpoint of this name.
Nothing is rendered, so it is exact by construction."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np

from meshrl.agent.endpoint import chat
from meshrl.agent.endpoint.conversation import Ask, ModelReply, RefusedRequest
from meshrl.agent.endpoint.dialect import Body, Event, Parts, WireFormat, count, require_allowed, sampling_of, texts


def read(body: Body) -> Ask:
    settings = body.get("sampling_params") or {}
    if not isinstance(settings, dict):
        raise RefusedRequest(400, f"sampling_params is {settings!r:.80}; it must be an object")
    require_allowed(settings)
    if body.get("features") is not None:
        raise RefusedRequest(400, "features are given; this endpoint takes text only")
    return Ask(
        ids=_ids(body, "token_ids", least=1),
        max_tokens=count(settings, "max_tokens"),
        stop=texts(settings, "stop"),
        stop_token_ids=tuple(_ids(settings, "stop_token_ids", least=0).tolist()),
        sampling=sampling_of(settings),
        stream=bool(body.get("stream")),
        logprobs=True,
    )


def _ids(body: Body, name: str, least: int) -> np.ndarray:
    """int32[C]"""
    value = body.get(name) or []
    good = isinstance(value, list) and len(value) >= least
    if not good or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise RefusedRequest(400, f"{name} is {value!r:.80}; it must be a list of at least {least} token ids")
    return np.array(value, np.int32)


def _choice(reply: ModelReply) -> Body:
    ids, logprobs = reply.turn.output_ids.tolist(), reply.turn.logprobs.tolist()
    content = [
        {"token": f"token_id:{i}", "token_id": i, "logprob": p, "top_logprobs": []} for i, p in zip(ids, logprobs)
    ]
    return {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": reply.finish,
        "weight_versions": reply.turn.versions.tolist(),
    }


def answer(ask: Ask, reply: ModelReply, model: str) -> Body:
    return {"request_id": reply.id, "model": model, "choices": [_choice(reply)], "usage": chat.usage_of(reply)}


async def stream(ask: Ask, reply_id: str, model: str, parts: Parts) -> AsyncIterator[list[Event]]:
    """One event: the ids of an answer are sent when it is complete."""
    async for part in parts:
        if not isinstance(part, str):
            yield [(None, answer(ask, part, model))]


TOKENS = WireFormat(read=read, answer=answer, stream=stream, error=chat.error, done="[DONE]")
