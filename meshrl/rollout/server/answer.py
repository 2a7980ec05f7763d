"""A server's answer to one request: parts of a stream, joined to a Turn."""

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

MIXED = "mixed"  # the label of weights after an incomplete sync

Labels = Mapping[str, int]
"""A server's label for its weights -> their version."""


@dataclass(kw_only=True, slots=True)
class AnswerPart:
    """One event of a stream, in a form that all servers share.

    logprob_ids: the tokens to which the logprobs belong, if the server returns them. top: the most likely (logprob,
    token) at each position. context: the ids that the server has continued; required in the first part. label_spans:
    {"version", "start", "end"} over all tokens so far. reason: the server's finish reason.

    Example: AnswerPart(tokens=[7, 2], logprobs=[-0.1, -0.3], logprob_ids=[7, 2], reason="stop")
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprob_ids: list[int] | None = None
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    context: list[int] | None = None
    label_spans: list[dict[str, Any]] = field(default_factory=list)
    cached_tokens: int = 0
    reason: str | None = None


class ServerAnswer:
    """Collects the parts of one answer. Tokens after the one that completes a stop string are left out."""

    def __init__(
        self, request: Request, bounds: Bounds, server: str, versions: Labels | int, search: StopSearch | None = None
    ):
        """server: its name in errors. versions: {label: version}, or one version for all tokens of this answer."""
        self.request, self._bounds, self._server = request, bounds, server
        self._versions, self._search = versions, search
        self.reason: StopReason | None = None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[float, int]]] = []
        self._num_sampled = 0  # tokens that the server has sampled, also after a stop string
        self._label_spans: list[dict[str, Any]] = []
        self._sent_ids, self._has_context = full_ids(request), False
        self._times = Times()
        self._sent_at = time.perf_counter()

    def add(self, part: AnswerPart) -> int:
        """Returns how many tokens the part added to the output."""
        self._check_context(part)
        is_complete = len(part.logprobs) == len(part.tokens) and None not in part.logprobs
        if not is_complete or part.logprob_ids not in (None, part.tokens):
            self._fail(
                f"returned {len(part.tokens)} token ids and {len(part.logprobs)} logprobs, or logprobs of other "
                "tokens; both are needed for each token (for an endpoint: return_token_ids, logprobs)"
            )
        if part.tokens and not self._tokens:
            self._times.prefill_s = time.perf_counter() - self._sent_at
        self._num_sampled += len(part.tokens)
        num_output = len(part.tokens) if self._search is None else self._search.count_output(part.tokens)
        self._tokens += part.tokens[:num_output]
        self._logprobs += part.logprobs[:num_output]
        self._top += part.top[:num_output]
        self._times.cached_tokens = part.cached_tokens or self._times.cached_tokens
        self._label_spans = part.label_spans or self._label_spans
        if part.reason is not None and self.reason is None:
            self.reason = self._stop_reason(part.reason)
        return num_output

    @property
    def needs_abort(self) -> bool:
        """Whether a stop string is complete, but the server, which does not know stop strings, is still sampling."""
        return self._found_stop and self.reason is None

    @property
    def _found_stop(self) -> bool:
        return self._search is not None and self._search.found

    def turn(self, engine_id: str) -> Turn:
        """The turn, once the stream has ended."""
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
            extras=self._extras(count),
            sampling=self.request.sampling,
            seed=self.request.seed,
            engine_id=engine_id,
            times=self._times,
        )

    def _check_context(self, part: AnswerPart) -> None:
        """The server must have continued the ids that it was sent."""
        sent = self._sent_ids
        if part.context != sent and not (self._has_context and part.context is None):
            echoed = "no ids at all" if part.context is None else f"{len(part.context)} ids that differ"
            raise RequestError(
                f"request {self.request.id}: {self._server} was sent {len(sent)} ids and echoed {echoed}; it must pass "
                "the ids to the model without a template or a tokenizer"
            )
        self._has_context = True

    def _stop_reason(self, reason: str) -> StopReason:
        if reason == "length":  # a server that reserves positions of its context ends before the limit
            return self._bounds.limit_reason if self._num_sampled == self._bounds.limit else "context"
        if reason not in ("stop", "abort"):
            self._fail(f"ended it with the unknown finish reason {reason!r}")
        return cast(StopReason, reason)

    def _token_versions(self) -> np.ndarray:
        """int32[R]. Weights change only while the server is paused, so the boundaries of its spans are exact. Tokens
        that mixed weights sampled before the request was aborted are left out."""
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
                f"sampled tokens with weights that this engine does not know; labels of the answer: {labels}. Does "
                "another program update this server?"
            )
        return versions

    def _extras(self, count: int) -> dict[str, np.ndarray]:
        topk = max(map(topk_of, self.request.want), default=0)
        if not topk:
            return {}
        best = [sorted(row, key=lambda pair: -pair[0])[:topk] for row in self._top[:count]]
        return {
            "topk_ids": np.array([[token for _, token in row] for row in best], np.int32),
            "topk_logprobs": np.array([[logprob for logprob, _ in row] for row in best], np.float32),
        }

    def _fail(self, problem: str) -> NoReturn:
        raise EngineFailure(f"request {self.request.id}: {self._server} {problem}")


def full_ids(request: Request) -> list[int]:
    """The ids that the server continues: the context, and tokens that were sampled before an abort."""
    return np.concatenate([request.context_ids, request.prefix_output]).tolist()
