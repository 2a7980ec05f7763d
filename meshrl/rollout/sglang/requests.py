"""A request as SGLang's own endpoint (`/generate`) takes it, and a Turn out of what it streams back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshrl.core.errors import CapabilityError, EngineFailure
from meshrl.core.types import Request, StopReason, Times, Turn
from meshrl.rollout.accept import Bounds
from meshrl.rollout.foreign.desk import check_echo, full_ids
from meshrl.rollout.stop_strings import StopSearch

STREAM_INTERVAL = 16  # tokens in one event, after the first, which comes at once
STREAM_INTERVAL_STOP = 4  # with stop strings: the server samples on until this process has seen one
MIXTURE = "mixture"  # what the server is told to call weights of which only a part has arrived
_BAD_REQUEST = 400


def check_capabilities(request: Request, bounds: Bounds) -> None:
    """Raises: CapabilityError for what this engine does not declare."""
    if request.media or request.media_spans:
        raise CapabilityError(f"request {request.id} has media; the SGLang engine takes text only")
    if request.adapter is not None:
        raise CapabilityError(f"request {request.id} names adapter {request.adapter!r}; the SGLang engine has none")
    if request.want:
        raise CapabilityError(
            f"request {request.id} wants {', '.join(request.want)}; the SGLang engine gives no extras"
        )
    if request.sampling.ignore_eos and bounds.stop_ids:
        raise CapabilityError(
            f"request {request.id} has ignore_eos and stop_token_ids {sorted(bounds.stop_ids)}; SGLang ignores both "
            "together. Give one of them"
        )


def body_of(request: Request, bounds: Bounds, rid: str) -> dict[str, Any]:
    """The JSON of a request. Ids go in as they are, so nothing is tokenized or rendered by the server (P21).

    rid: of a fixed length. SGLang aborts by prefix, so "a-1" would take "a-10" along.
    """
    p = request.sampling
    sampling: dict[str, Any] = {
        "max_new_tokens": bounds.limit,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k or -1,
        "min_p": p.min_p,
        "repetition_penalty": p.repetition_penalty,
        "ignore_eos": not bounds.stop_ids,
        "sampling_seed": request.seed,  # drawn by place in the row, so a continuation goes on with the same (P14)
        "stream_interval": STREAM_INTERVAL_STOP if p.stop else STREAM_INTERVAL,
    }
    if bounds.stop_ids:
        sampling["stop_token_ids"] = sorted(bounds.stop_ids)
    return {
        "rid": rid,
        "input_ids": full_ids(request),
        "sampling_params": sampling,
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "stream": True,
    }


def scoring_body(ids: list[int], rid: str) -> dict[str, Any]:
    """No new token, and logprobs of the prompt from its start, which SGLang computes without its prefix cache."""
    return {
        "rid": rid,
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def scores_of(answer: dict[str, Any], ids: list[int]) -> np.ndarray:
    """float32[T] of the answer to a scoring body. Raises: EngineFailure."""
    pairs = answer["meta_info"].get("input_token_logprobs") or []
    if [pair[1] for pair in pairs] != ids:
        raise EngineFailure(f"SGLang scored {len(pairs)} ids, which are not the {len(ids)} that it was sent")
    scores = np.array([0.0, *(pair[0] for pair in pairs[1:])], np.float32)
    return np.minimum(scores, 0)


class Answer:
    """The events of one request, as they come in."""

    def __init__(self, request: Request, bounds: Bounds, versions: Mapping[str, int], search: StopSearch | None = None):
        """versions: what SGLang calls each version of the weights -> the version."""
        self.request, self._bounds, self._known, self._search = request, bounds, versions, search
        self.tokens: list[int] = []
        self._num_sampled = 0  # by the server, also after a stop string
        self._logprobs: list[float] = []
        self._spans: list[dict[str, Any]] = []
        self._reason: StopReason | None = None
        self._times = Times()
        self._sent = time.perf_counter()

    def take(self, event: dict[str, Any]) -> int:
        """Add an event; returns how many tokens it added to the output. Raises: RequestError, EngineFailure.

        An event holds the tokens since the last one, or all since the first; one of an abort in the queue may say the
        last token again. So what is new goes by the count of all.
        """
        meta = event["meta_info"]
        check_echo(self.request, full_ids(self.request), event.get("prompt_token_ids"), "SGLang")
        new = meta["completion_tokens"] - self._num_sampled
        ids = event.get("output_ids") or []
        pairs = meta.get("output_token_logprobs") or []
        if not 0 <= new <= len(ids):
            raise EngineFailure(
                f"request {self.request.id}: SGLang has {meta['completion_tokens']} tokens and sent {len(ids)} after "
                f"{self._num_sampled}; some are lost"
            )
        fresh, pairs = ids[len(ids) - new :], pairs[max(0, len(pairs) - new) :]
        if [pair[1] for pair in pairs] != fresh or any(pair[0] is None for pair in pairs):
            raise EngineFailure(
                f"request {self.request.id}: SGLang sampled {new} tokens and gave the logprobs of {len(pairs)}, or of "
                "others"
            )
        if new and not self.tokens:
            self._times.prefill_s = time.perf_counter() - self._sent
        self._num_sampled += new
        if self._search is not None:
            kept = self._search.num_kept(fresh)
            fresh, pairs = fresh[:kept], pairs[:kept]
        self.tokens += fresh
        self._logprobs += [pair[0] for pair in pairs]
        self._times.cached_tokens = meta.get("cached_tokens") or self._times.cached_tokens
        self._spans = meta.get("weight_versions") or self._spans
        if meta["finish_reason"] is not None:
            self._reason = self._reason_of(meta["finish_reason"])
        return len(fresh)

    @property
    def found_stop(self) -> bool:
        """Whether a stop string is complete."""
        return self._search is not None and self._search.found

    @property
    def is_over(self) -> bool:
        """Whether a stop string is complete and the server, which does not get stop strings, samples on."""
        return self.found_stop and self._reason is None

    def _reason_of(self, said: dict[str, Any]) -> StopReason:
        if said["type"] == "length":
            # SGLang keeps the last places of its context empty, so it may end before the limit
            return self._bounds.limit_reason if self._num_sampled == self._bounds.limit else "context"
        if said["type"] == "abort" and (said.get("status_code") or 0) < _BAD_REQUEST:
            return "abort"
        if said["type"] == "stop":
            return "stop"
        raise EngineFailure(f"request {self.request.id}: SGLang ended it with {said}")

    def turn(self, engine_id: str) -> Turn:
        """The turn, once the stream has ended."""
        if self._reason is None:
            raise EngineFailure(f"request {self.request.id}: SGLang's answer ended without a reason")
        self._times.decode_s = time.perf_counter() - self._sent - self._times.prefill_s
        versions = self._versions()
        count = len(versions)
        reason: StopReason = "stop" if self.found_stop else self._reason
        return Turn(
            context_ids=self.request.context_ids,
            output_ids=np.array(self.tokens[:count], np.int32),
            logprobs=np.minimum(np.array(self._logprobs[:count], np.float32), 0),
            versions=versions,
            stop_reason=reason if count == len(self.tokens) else "abort",
            sampling=self.request.sampling,
            seed=self.request.seed,
            engine_id=engine_id,
            times=self._times,
        )

    def _versions(self) -> np.ndarray:
        """int32[R]. The scheduler notes how many tokens each request had when the weights changed. What a mixture has
        sampled before it was aborted is left out."""
        versions = np.full(len(self.tokens), -1, np.int32)
        for span in self._spans:
            if span["version"] == MIXTURE:
                versions = versions[: span["start"]]
            else:
                versions[span["start"] : span["end"]] = self._known.get(span["version"], -1)
        if (versions < 0).any():
            labels = ", ".join(str(span["version"]) for span in self._spans) or "none"
            raise EngineFailure(
                f"request {self.request.id}: not every token is of weights that this engine knows; SGLang named "
                f"{labels}. Does another program update this server?"
            )
        return versions
