"""The scheduler: a first-in first-out queue, a bounded set of running sequences, and shared prompts of groups.

Pure Python over ids and lengths, without tensors. Row i of the running store belongs to `running[i]`, and row j of
the prompt store to `prompts[j]`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshrl.core.types import Request, Times
from meshrl.rollout.admission import Bounds
from meshrl.rollout.embedded.kv_cache import CacheBound, RowCopy, arrange
from meshrl.rollout.stop_strings import StopSearch


@dataclass(eq=False, slots=True)
class SharedPrompt:
    """The equal context of several waiting sequences: computed once, copied to each, dropped when none of them waits.

    last_hidden: the final hidden state of its last token, from which every sequence samples its first token.
    """

    key: bytes
    length: int
    row: int
    last_hidden: Any = None


@dataclass(eq=False, slots=True)
class Sequence:
    """One unfinished request. tokens, logprobs, versions, extras: sampled by this engine, without prefix_output."""

    request: Request
    bounds: Bounds
    stop_search: StopSearch | None
    key: bytes = b""  # context, prefix and sampled tokens; sequences with equal keys share a prompt
    cached: int = 0  # tokens in its row of the KV cache
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    extras: list[dict[str, np.ndarray]] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    clock: float = field(default_factory=time.perf_counter)

    @property
    def first_position(self) -> int:
        """Output position of the first token sampled here: a continuation starts where its prefix ends."""
        return len(self.request.prefix_output)

    @property
    def max_cached(self) -> int:
        """The length of its row at most: the last token that it samples is not cached."""
        return len(self.request.context_ids) + self.first_position + self.bounds.limit - 1

    def ids(self) -> np.ndarray:
        """All tokens so far: int64[context + prefix + sampled]."""
        parts = self.request.context_ids, self.request.prefix_output, self.tokens
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self.clock = self.clock, time.perf_counter()
        return self.clock - before


@dataclass(slots=True)
class Prefill:
    """A context to compute, int64[C] ids, into a row of the running store, or of the prompt store. request: one of
    those that have this context."""

    request: Request
    ids: np.ndarray
    row: int
    prompt: SharedPrompt | None


@dataclass(slots=True)
class Admission:
    """The sequences that join in this step, in the order of their rows, each with the prompt that it copies (None = its
    context is computed in its own row); and the contexts to compute."""

    joined: list[tuple[Sequence, SharedPrompt | None]] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)


class Scheduler:
    """max_running: rows decoded together; urgent requests join in any case. prefill_tokens: context tokens computed in
    one step, so that many long prompts do not delay running requests; a single longer context is still admitted, alone.
    bound: of the KV cache."""

    def __init__(self, max_running: int, prefill_tokens: int, bound: CacheBound):
        self.max_running, self.prefill_tokens, self.bound = max_running, prefill_tokens, bound
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prompts: list[SharedPrompt] = []
        self._prompt_of_key: dict[bytes, SharedPrompt] = {}
        self._waiting_of_key: Counter[bytes] = Counter()

    def submit(self, sequence: Sequence) -> None:
        self._enqueue(sequence)
        (self.waiting.appendleft if sequence.request.is_urgent else self.waiting.append)(sequence)

    def admit(self) -> Admission:
        """Admit requests from the head of the queue while there are rows, prefill budget, and memory for all that they
        can sample. Without running rows the first one is admitted in any case.

        Waiting sequences with equal contexts share a prompt: it is computed for the first one, and the others copy it,
        now or when they get a row.
        """
        admission, budget = Admission(), self.prefill_tokens
        longest = max((s.max_cached for s in self.running), default=0) if self.waiting else 0
        while self.waiting and (len(self.running) < self.max_running or self.waiting[0].request.is_urgent):
            sequence = self.waiting[0]
            prompt = self._prompt_of_key.get(sequence.key)
            ids = sequence.ids()
            longest = max(longest, sequence.max_cached)
            shares = prompt is None and self._waiting_of_key[sequence.key] > 1
            if not self._fits(longest, len(ids) if shares else 0):
                shares = False
                if not self._fits(longest):
                    if self.running:
                        break
                    self.prompts, self._prompt_of_key, prompt = [], {}, None
                    self.bound.clear()
            if prompt is not None:
                sequence.times.cached_tokens += len(ids)
            else:
                if admission.prefills and len(ids) > budget:
                    break
                budget -= len(ids)
                if shares:
                    prompt = SharedPrompt(sequence.key, len(ids), len(self.prompts))
                    self.prompts.append(prompt)
                    self._prompt_of_key[sequence.key] = prompt
                admission.prefills.append(
                    Prefill(sequence.request, ids, prompt.row if prompt else len(self.running), prompt)
                )
            self._dequeue(self.waiting.popleft())
            sequence.times.queue_s += sequence.lap()
            sequence.cached = len(ids)
            self.running.append(sequence)
            admission.joined.append((sequence, prompt))
        return admission

    def _fits(self, longest: int, new_prompt: int = 0) -> bool:
        """Whether one more running row fits, and a new shared prompt of this length (0 = none), if no row gets longer
        than `longest`."""
        prompts = [p.length for p in self.prompts] + [new_prompt] * (new_prompt > 0)
        return self.bound.fits(len(self.running) + 1, longest, len(prompts), max(prompts, default=0))

    def compact(self, gone: Collection[int], sort: bool = True) -> tuple[list[RowCopy], list[RowCopy]]:
        """Remove the rows in `gone`, drop prompts that no sequence waits for, and close the gaps. sort: see `arrange`.

        Returns the moves of running rows and of prompt rows; the caller must move the rows of the KV cache before the
        next step.
        """
        order = arrange([s.cached for s in self.running], gone, sort)
        running = [(row, old, self.running[old].cached) for row, old in enumerate(order) if row != old]
        self.running = [self.running[row] for row in order]
        unused = {p.row for p in self.prompts if not self._waiting_of_key[p.key]}
        for row in unused:
            del self._prompt_of_key[self.prompts[row].key]
        order = arrange([p.length for p in self.prompts], unused, sort)
        self.prompts = [self.prompts[row] for row in order]
        prompts = [(row, p.row, p.length) for row, p in enumerate(self.prompts) if row != p.row]
        for row, prompt in enumerate(self.prompts):
            prompt.row = row
        return running, prompts

    def withdraw(self, ids: Collection[str] | None) -> tuple[list[Sequence], list[int]]:
        """Remove these requests (None = all) from the queue; returns them, and the rows of those that run, for
        `compact`."""
        left = [s for s in self.waiting if ids is None or s.request.id in ids]
        self.waiting = deque(s for s in self.waiting if ids is not None and s.request.id not in ids)
        for sequence in left:
            self._dequeue(sequence)
        return left, [row for row, s in enumerate(self.running) if ids is None or s.request.id in ids]

    def preempt_all(self) -> None:
        """Preempt all running sequences: they return to the head of the queue with their tokens, without a cache."""
        for sequence in reversed(self.running):
            sequence.cached = 0
            sequence.times.decode_s += sequence.lap()
            self._enqueue(sequence)
            self.waiting.appendleft(sequence)
        self.running, self.prompts, self._prompt_of_key = [], [], {}

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.key = sequence.ids().tobytes()
        self._waiting_of_key[sequence.key] += 1

    def _dequeue(self, sequence: Sequence) -> None:
        self._waiting_of_key[sequence.key] -= 1
        if not self._waiting_of_key[sequence.key]:
            del self._waiting_of_key[sequence.key]
