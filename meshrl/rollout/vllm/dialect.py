"""How a vLLM server is spoken to: its token endpoint (`/inference/v1/generate`) and its commands.

Ids go in as they are, so the server tokenizes and renders nothing (P21). vLLM's own end-of-text is switched off: the
turn ends at the ids that meshrl gives, as with every engine. Logprobs are those of the distribution that was sampled
from (`--logprobs-mode processed_logprobs`, P2).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from meshrl.core.errors import CapabilityError, EngineFailure, SyncError
from meshrl.core.types import Request, mix64
from meshrl.rollout.admission import Bounds, check_supported, topk_of
from meshrl.rollout.base import Capabilities
from meshrl.rollout.server.answer import Part, full_ids
from meshrl.rollout.server.dialect import Dialect, sampling_body, stream_interval
from meshrl.rollout.server.http import HttpClient
from meshrl.rollout.server.process import ServerProcess

MAX_TOPK = 19  # vLLM returns 20 with each token, one of which may be the sampled one
_GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"  # vLLM puts it before the ids of requests to that endpoint
_LEAST_TEMPERATURE = 0.01  # vLLM raises smaller ones to it, so it would sample another distribution than it reports


class VllmDialect(Dialect):
    """A vLLM server that this process has started."""

    name = "vLLM"
    loaded_label = "default"
    drains_before_release = True  # vLLM has died over requests that it held in place while its memory was released
    no_release = "the server runs without --enable-sleep-mode; use rollout.release_memory"

    def __init__(self, http: HttpClient, server: ServerProcess | None, can_release: bool):
        """server: ended by `close`; None = it stays."""
        super().__init__(http)
        self._server = server
        self.capabilities = Capabilities(release=can_release, in_flight=True, score=True)

    # ---- requests

    def check(self, request: Request, bounds: Bounds) -> None:
        check_supported(
            request, self.name, lambda name: 1 <= topk_of(name) <= MAX_TOPK, f"topk:N, N from 1 to {MAX_TOPK}"
        )
        if 0 < request.sampling.temperature < _LEAST_TEMPERATURE:
            raise CapabilityError(
                f"request {request.id}: sampling.temperature is {request.sampling.temperature:g}; vLLM takes 0 "
                f"(greedy) or {_LEAST_TEMPERATURE} and more"
            )

    async def stream(self, request: Request, bounds: Bounds) -> AsyncGenerator[Part]:
        async with aclosing(self.http.stream(_GENERATE, _body(request, bounds))) as events:
            async for event in events:
                yield part_of(event)

    async def abort(self, ids: Sequence[str]) -> None:
        await self.http.post("/abort_requests", {"request_ids": [_ID_PREFIX + name for name in ids]})

    async def score(self, ids: list[int]) -> np.ndarray:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        answer = await self.http.post(_GENERATE, {"token_ids": ids, "sampling_params": sampling})
        scores = np.zeros(len(ids), np.float32)
        for position, entry in enumerate(answer["prompt_logprobs"]):
            if entry is not None:
                scores[position] = min(entry[str(ids[position])]["logprob"], 0.0)
        return scores

    # ---- commands

    async def hold(self) -> None:
        await self.http.post("/pause", mode="keep", clear_cache=False)

    async def go_on(self) -> None:
        await self.http.post("/resume")

    async def call_workers(self, method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        answer = await self.http.post("/collective_rpc", {"method": method, "kwargs": arguments})
        return list(answer["results"])

    async def begin_update(self, label: str, has_cache: bool) -> None:
        await self._drop_caches()

    async def end_update(self, label: str) -> None:
        await self.http.post("/update_weight_version", {"new_version": label})

    async def release(self, parts: set[str]) -> int:
        await self._drop_caches()
        return await self._memory("meshrl_release", parts)

    async def restore(self, parts: set[str]) -> int:
        return await self._memory("meshrl_restore", parts)

    async def _memory(self, method: str, parts: set[str]) -> int:
        answers = await self.call_workers(method, {"parts": sorted(parts)})
        for answer in answers:
            if "error" in answer:
                raise EngineFailure(f"{self.http.name}: {answer['error']}")
        return sum(answer["num_bytes"] for answer in answers)

    async def _drop_caches(self) -> None:
        """Drop the cached keys and values of all tokens; those of running requests are computed again."""
        answer = await self.http.post("/reset_prefix_cache", reset_running_requests=True)
        if not answer["success"]:
            raise SyncError(f"{self.http.name}: vLLM could not drop its prefix cache, which belongs to the old weights")

    async def close(self) -> None:
        await super().close()
        if self._server is not None:
            self._server.close()


def _body(request: Request, bounds: Bounds) -> dict[str, Any]:
    topk = max(map(topk_of, request.want), default=0)
    sampling = sampling_body(request, bounds) | {
        "ignore_eos": True,
        "seed": _seed_of(request),
        "max_tokens": bounds.limit,
        "logprobs": topk + 1 if topk else 0,
        "detokenize": False,
        "stream_interval": stream_interval(request),
    }
    return {
        "request_id": request.id,
        "token_ids": full_ids(request),
        "sampling_params": sampling,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _seed_of(request: Request) -> int:
    """vLLM's generators start with the request. A continuation with the same seed would repeat the random numbers of
    the tokens before it, so it gets another one."""
    done = 0 if request.prefix_output is None else len(request.prefix_output)
    return mix64(request.seed ^ mix64(done)) >> 1 if done else request.seed


def part_of(event: dict[str, Any]) -> Part:
    """The first event echoes the prompt, and the last one has no choices."""
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    part = Part(context=event.get("prompt_token_ids"), cached_tokens=details.get("cached_tokens") or 0)
    for choice in event["choices"]:
        content = (choice["logprobs"] or {}).get("content") or []
        part.tokens = choice["token_ids"] or []
        part.logprobs = [entry["logprob"] for entry in content]
        part.logprob_ids = [entry["token_id"] for entry in content]
        part.top = [[(top["logprob"], top["token_id"]) for top in entry["top_logprobs"]] for entry in content]
        part.label_spans = choice.get("weight_versions") or []
        part.reason = choice["finish_reason"]
    return part
