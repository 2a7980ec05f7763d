"""A server's answer to one request, from the parts of its stream to the Turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import numpy as np

from meshrl.core.errors import EngineFailure, RequestError
from meshrl.core.types import Request, StopReason, Times, Turn
from meshrl.rollout.admission import Bounds, topk_of
from meshrl.rollout.stop_strings import StopSearch

MIXED = "mixed"  # the label of weights of which only a part has arrived

Labels = Mapping[str, int]
"""The label that a server gives to its weights -> their version."""


@dataclass(kw_only=True, slots=True)
class Part:
    """One event of a stream, in terms that all servers share.

    logprob_ids: the tokens that the logprobs are of, where the server names them. top: the most likely (logprob, token)
    at each position. context: the ids that the server has continued; it must come with the first part. label_spans:
    {"version", "start", "end"} over all tokens so far. reason: why the answer ended, in the server's words.

    Example: Part(tokens=[7, 2], logprobs=[-0.1, -0.3], logprob_ids=[7, 2], reason="stop")
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprob_ids: list[int] | None = None
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    context: list[int] | None = None
    label_spans: list[dict[str, Any]] = field(default_factory=list)
    cached_tokens: int = 0
    reason: str | None = None


class Answer:
    """The parts of one answer as they arrive. Tokens after the one that completes a stop string are left out."""

    def __init__(
        self, request: Request, bounds: Bounds, server: str, versions: Labels | int, search: StopSearch | None = None
    ):
        """server: its name in errors. versions: by label, or one for all tokens of this answer."""
        self.request, self._bounds, self._server = request, bounds, server
        self._versions, self._search = versions, search
        self.reason: StopReason | None = None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[float, int]]] = []
        self._num_sampled = 0  # by the server, also after a stop string
        self._label_spans: list[dict[str, Any]] = []
        self._sent_ids, self._has_context = full_ids(request), False
        self._times = Times()
        self._sent_at = time.perf_counter()

    def add(self, part: Part) -> int:
        """Returns how many tokens the part added to the output. Raises: RequestError, EngineFailure."""
        self._check_context(part)
        is_complete = len(part.logprobs) == len(part.tokens) and None not in part.logprobs
        if not is_complete or part.logprob_ids not in (None, part.tokens):
            self._fail(
                f"gave {len(part.tokens)} token ids and {len(part.logprobs)} logprobs, or logprobs of other tokens; it "
                "must return both for each token (of an endpoint: return_token_ids, logprobs)"
            )
        if part.tokens and not self._tokens:
            self._times.prefill_s = time.perf_counter() - self._sent_at
        self._num_sampled += len(part.tokens)
        kept = len(part.tokens) if self._search is None else self._search.num_kept(part.tokens)
        self._tokens += part.tokens[:kept]
        self._logprobs += part.logprobs[:kept]
        self._top += part.top[:kept]
        self._times.cached_tokens = part.cached_tokens or self._times.cached_tokens
        self._label_spans = part.label_spans or self._label_spans
        if part.reason is not None and self.reason is None:
            self.reason = self._reason_of(part.reason)
        return kept

    @property
    def is_over(self) -> bool:
        """Whether a stop string is complete and the server, which does not get stop strings, samples on."""
        return self._found_stop and self.reason is None

    @property
    def _found_stop(self) -> bool:
        return self._search is not None and self._search.found

    def turn(self, engine_id: str) -> Turn:
        """The turn, once the stream has ended. Raises: EngineFailure."""
        if self.reason is None:
            self._fail("ended its answer without a reason")
        self._times.decode_s = time.perf_counter() - self._sent_at - self._times.prefill_s
        versions = self._token_versions()
        count = len(versions)
        reason = "stop" if self._found_stop else self.reason
        return Turn(
            context_ids=self.request.context_ids,
            output_ids=np.array(self._tokens[:count], np.int32),
            logprobs=np.minimum(np.array(self._logprobs[:count], np.float32), 0),
            versions=versions,
            stop_reason=reason if count == len(self._tokens) else "abort",
            extras=self._extras(),
            sampling=self.request.sampling,
            seed=self.request.seed,
            engine_id=engine_id,
            times=self._times,
        )

    def _check_context(self, part: Part) -> None:
        """P21: the server has continued the ids that it was sent."""
        sent = self._sent_ids
        if part.context != sent and not (self._has_context and part.context is None):
            echoed = "no ids at all" if part.context is None else f"{len(part.context)} ids that differ"
            raise RequestError(
                f"request {self.request.id}: {self._server} was sent {len(sent)} ids and echoed {echoed}; a template "
                "or a tokenizer stands between meshrl and the model"
            )
        self._has_context = True

    def _reason_of(self, reason: str) -> StopReason:
        if reason == "length":  # a server that reserves places of its context ends before the limit
            return self._bounds.limit_reason if self._num_sampled == self._bounds.limit else "context"
        if reason not in ("stop", "abort"):
            self._fail(f"ended it with {reason!r}")
        return cast(StopReason, reason)

    def _token_versions(self) -> np.ndarray:
        """int32[R]. Weights change only while the server is paused, so the boundaries of its spans are exact. Tokens
        of mixed weights, sampled before the request was aborted, are left out."""
        if isinstance(self._versions, int):
            return np.full(len(self._tokens), self._versions, np.int32)
        versions = np.full(len(self._tokens), -1, np.int32)
        for span in self._label_spans:
            if span["version"] == MIXED:
                versions = versions[: span["start"]]
            else:
                versions[span["start"] : span["end"]] = self._versions.get(span["version"], -1)
        if (versions < 0).any():
            labels = ", ".join(str(span["version"]) for span in self._label_spans) or "none"
            self._fail(
                f"did not sample every token with weights that this engine knows; it named {labels}. Does another "
                "program update this server?"
            )
        return versions

    def _extras(self) -> dict[str, np.ndarray]:
        topk = max(map(topk_of, self.request.want), default=0)
        if not topk:
            return {}
        best = [sorted(row, key=lambda pair: -pair[0])[:topk] for row in self._top]
        return {
            "topk_ids": np.array([[token for _, token in row] for row in best], np.int32),
            "topk_logprobs": np.array([[logprob for logprob, _ in row] for row in best], np.float32),
        }

    def _fail(self, what: str) -> NoReturn:
        raise EngineFailure(f"request {self.request.id}: {self._server} {what}")


def full_ids(request: Request) -> list[int]:
    """The ids that the server continues: the context, and what was sampled before an abort."""
    prefix = [] if request.prefix_output is None else [np.asarray(request.prefix_output)]
    return np.concatenate([np.asarray(request.context_ids), *prefix]).tolist()
