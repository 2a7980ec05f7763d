"""A request as vLLM's token endpoint (`/inference/v1/generate`) takes it, and a Turn out of what it streams back."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from meshrl.core.errors import CapabilityError, EngineFailure
from meshrl.core.types import Request, StopReason, Times, Turn, mix64
from meshrl.rollout.accept import Bounds
from meshrl.rollout.foreign.desk import check_echo, full_ids
from meshrl.rollout.stop_strings import StopSearch

STREAM_INTERVAL = 16  # tokens in one event, after the first, which comes at once
STREAM_INTERVAL_STOP = 4  # with stop strings: the server samples on until this process has seen one
MAX_TOPK = 19  # vLLM gives 20 with each token, one of which may be the sampled one
_LEAST_TEMPERATURE = 0.01  # vLLM raises smaller ones to it, which would sample another distribution than is reported


def check_capabilities(request: Request) -> None:
    """Raises: CapabilityError for what this engine does not declare."""
    if request.media or request.media_spans:
        raise CapabilityError(f"request {request.id} has media; the vLLM engine takes text only")
    if request.adapter is not None:
        raise CapabilityError(f"request {request.id} names adapter {request.adapter!r}; the vLLM engine has none")
    if 0 < request.sampling.temperature < _LEAST_TEMPERATURE:
        raise CapabilityError(
            f"request {request.id}: sampling.temperature is {request.sampling.temperature:g}; vLLM takes 0 (greedy) or "
            f"{_LEAST_TEMPERATURE} and more"
        )
    for name in request.want:
        if not 1 <= _topk_of(name) <= MAX_TOPK:
            raise CapabilityError(
                f"request {request.id} wants {name!r}; the vLLM engine gives 'topk:N' (N from 1 to {MAX_TOPK})"
            )


def body_of(request: Request, bounds: Bounds) -> dict[str, Any]:
    """The JSON of a request. Ids go in as they are, so nothing is tokenized or rendered by the server (P21).

    vLLM's own end-of-text is switched off: the turn ends at the ids that meshrl gives, on every engine the same.
    """
    p = request.sampling
    topk = max(map(_topk_of, request.want), default=0)
    return {
        "request_id": request.id,
        "token_ids": full_ids(request),
        "sampling_params": {
            "temperature": p.temperature,
            "top_p": p.top_p,
            "top_k": p.top_k,
            "min_p": p.min_p,
            "repetition_penalty": p.repetition_penalty,
            "seed": _seed_of(request),
            "max_tokens": bounds.limit,
            "stop_token_ids": sorted(bounds.stop_ids),
            "ignore_eos": True,
            "logprobs": topk + 1 if topk else 0,
            "detokenize": False,
            "stream_interval": STREAM_INTERVAL_STOP if p.stop else STREAM_INTERVAL,
        },
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _seed_of(request: Request) -> int:
    """vLLM's generators start with the request. A continuation that started with the same seed would draw with the
    noise of the tokens before it once more, so it gets one of its own."""
    done = 0 if request.prefix_output is None else len(request.prefix_output)
    return mix64(request.seed ^ mix64(done)) >> 1 if done else request.seed


def _topk_of(name: str) -> int:
    """N of "topk:N"; 0 for any other name."""
    kind, _, number = name.partition(":")
    return int(number) if kind == "topk" and number.isdecimal() else 0


class Answer:
    """The events of one request, as they come in."""

    def __init__(self, request: Request, bounds: Bounds, trusted: int, search: StopSearch | None = None):
        """trusted: the version of what was loaded from the folder, which the server calls "default"."""
        self.request, self._bounds, self._trusted, self._search = request, bounds, trusted, search
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[float, int]]] = []
        self._spans: list[dict[str, Any]] = []
        self._reason: StopReason | None = None
        self._is_echoed = False
        self._times = Times()
        self._sent = time.perf_counter()

    def take(self, event: dict[str, Any]) -> int:
        """Add an event; returns how many tokens it added to the output. Raises: RequestError, EngineFailure."""
        if not self._is_echoed:  # with the first event, and with no other
            check_echo(self.request, full_ids(self.request), event.get("prompt_token_ids"), "vLLM")
            self._is_echoed = True
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        self._times.cached_tokens = details.get("cached_tokens") or self._times.cached_tokens
        if not event["choices"]:
            return 0
        (choice,) = event["choices"]
        new = choice["token_ids"] or []
        if new and not self.tokens:
            self._times.prefill_s = time.perf_counter() - self._sent
        content = (choice["logprobs"] or {}).get("content") or []
        if [entry["token_id"] for entry in content] != new:
            raise EngineFailure(f"request {self.request.id}: vLLM gave logprobs of other tokens than it sampled")
        if self._search is not None:
            kept = self._search.num_kept(new)
            new, content = new[:kept], content[:kept]
        self.tokens += new
        self._logprobs += [entry["logprob"] for entry in content]
        if self.request.want:
            self._top += [[(top["logprob"], top["token_id"]) for top in entry["top_logprobs"]] for entry in content]
        self._spans = choice.get("weight_versions") or self._spans
        if choice["finish_reason"] is not None:
            self._reason = self._reason_of(choice["finish_reason"])
        return len(new)

    @property
    def found_stop(self) -> bool:
        """Whether a stop string is complete."""
        return self._search is not None and self._search.found

    @property
    def is_over(self) -> bool:
        """Whether a stop string is complete and the server, which does not get stop strings, samples on."""
        return self.found_stop and self._reason is None

    def _reason_of(self, said: str) -> StopReason:
        if said == "length":
            return self._bounds.limit_reason
        if said not in ("stop", "abort"):
            raise EngineFailure(f"request {self.request.id}: vLLM ended it with {said!r}")
        return "stop" if said == "stop" else "abort"

    def turn(self, engine_id: str) -> Turn:
        """The turn, once the stream has ended."""
        if self._reason is None:
            raise EngineFailure(f"request {self.request.id}: vLLM's answer ended without a reason")
        self._times.decode_s = time.perf_counter() - self._sent - self._times.prefill_s
        return Turn(
            context_ids=self.request.context_ids,
            output_ids=np.array(self.tokens, np.int32),
            logprobs=np.minimum(np.array(self._logprobs, np.float32), 0),
            versions=self._versions(),
            stop_reason="stop" if self.found_stop else self._reason,
            extras=self._extras(),
            sampling=self.request.sampling,
            seed=self.request.seed,
            engine_id=engine_id,
            times=self._times,
        )

    def _versions(self) -> np.ndarray:
        """int32[R]. The engine core labels every step's tokens with the version it computed them with; versions change
        only while it is paused, so the boundary is exact."""
        versions = np.full(len(self.tokens), -1, np.int32)
        for span in self._spans:
            label = span["version"]
            versions[span["start"] : span["end"]] = self._trusted if label == "default" else int(label)
        if (versions < 0).any():
            raise EngineFailure(f"request {self.request.id}: vLLM did not say which weights made each token")
        return versions

    def _extras(self) -> dict[str, np.ndarray]:
        extras: dict[str, np.ndarray] = {}
        for name in self.request.want:
            best = [sorted(row, key=lambda pair: -pair[0])[: _topk_of(name)] for row in self._top]
            extras["topk_ids"] = np.array([[token for _, token in row] for row in best], np.int32)
            extras["topk_logprobs"] = np.array([[logprob for logprob, _ in row] for row in best], np.float32)
        return extras
