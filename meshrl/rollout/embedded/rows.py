"""What a step reads and writes of all running sequences, as arrays: its work on the host does not grow with each row.

A sequence has a slot while it runs, the same as in the page table; `slots` is the order of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar

import numpy as np

from meshrl.core.types import Request, SamplingParams, Times
from meshrl.model.inputs import TEXT_INPUTS, ModelInputs
from meshrl.rollout.admission import Bounds
from meshrl.rollout.stop_strings import StopSearch

T = TypeVar("T")
_MORE_TOKENS = 512  # columns by which the arrays of sampled tokens grow


@dataclass(eq=False, slots=True)
class Sequence:
    """One unfinished request. context: the keys of its tokens (`ModelInputs.keys`). offset: of the position of a
    sampled token from its index. tokens, logprobs: sampled by this engine, without prefix_output, as far as it has left
    the rows; versions: (weight version, number of tokens), of all sampled ones. slot: -1 = it does not run."""

    request: Request
    bounds: Bounds
    stop_search: StopSearch | None
    inputs: InitVar[ModelInputs] = TEXT_INPUTS
    context: np.ndarray = field(init=False)
    offset: int = field(init=False)
    key: bytes = b""  # of all tokens so far; sequences with equal keys share a context
    slot: int = -1
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: list[tuple[int, int]] = field(default_factory=list)
    extras: list[dict[str, np.ndarray]] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    clock: float = field(default_factory=time.perf_counter)

    def __post_init__(self, inputs: ModelInputs) -> None:
        self.context = inputs.keys(self.request, np.asarray(self.request.context_ids))
        self.offset = inputs.offset(self.request)

    @property
    def first_position(self) -> int:
        """Output position of the first token sampled here: a continuation starts where its prefix ends."""
        return len(self.request.prefix_output)

    @property
    def max_cached(self) -> int:
        """The length of its row at most: the last token that it samples is not cached."""
        return len(self.request.context_ids) + self.first_position + self.bounds.limit - 1

    def ids(self, sampled: np.ndarray | None = None) -> np.ndarray:
        """The keys of all its tokens: int64[context + prefix + sampled]. sampled: while it runs."""
        parts = self.context, self.request.prefix_output, self.tokens if sampled is None else sampled
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self.clock = self.clock, time.perf_counter()
        return self.clock - before


def filters(p: SamplingParams) -> bool:
    """Whether a request samples from a part of the distribution, or from another one."""
    return p.top_p < 1 or p.top_k > 0 or p.min_p > 0 or p.repetition_penalty != 1


_FIELDS = np.dtype(
    [
        ("length", np.int64),
        ("cached", np.int64),
        ("position", np.int64),
        ("offset", np.int64),
        ("sampled", np.int64),
        ("limit", np.int64),
        ("last", np.int64),
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("is_special", np.bool_),
    ]
)


class Rows:
    """sequences: in the order of the batch. By slot: length = known tokens, cached = those whose keys and values are in
    the cache, position = output position of the next token, offset = of a token's position from its index, sampled =
    tokens in `tokens` and `logprobs`, limit = of them, last = the newest token; is_special = it has filters, extras or
    stop strings, so the host looks at each token."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.slots = np.zeros(0, np.int64)
        self.tokens: np.ndarray = np.zeros((0, _MORE_TOKENS), np.int32)
        self.logprobs: np.ndarray = np.zeros((0, _MORE_TOKENS), np.float32)
        self._stops, self._stop_array = set[int](), np.zeros(0, np.int64)  # of all rows, and of some that have ended
        self._fixed: Any = None
        self._set_fields(np.zeros(0, _FIELDS))

    def fixed(self, make: Callable[[Rows], T]) -> T:
        """What `make` returns for these rows; made again when rows join or leave."""
        if self._fixed is None:
            self._fixed = make(self)
        return self._fixed  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence, slot: int, ids: np.ndarray, cached: int) -> None:
        """ids: of the sequence. cached: those in the cache before the step, or computed by its prefill."""
        if slot >= len(self.length):
            self._grow(slot + 1)
        request, sampled = sequence.request, len(sequence.tokens)
        sequence.slot = slot
        self.length[slot], self.cached[slot], self.last[slot] = len(ids), cached, ids[-1]
        self.position[slot], self.sampled[slot] = sequence.first_position + sampled, sampled
        self.limit[slot], self.offset[slot] = sequence.bounds.limit, sequence.offset
        self.seed[slot] = request.seed & (1 << 64) - 1
        self.temperature[slot] = request.sampling.temperature
        self.is_special[slot] = filters(request.sampling) or bool(request.want) or sequence.stop_search is not None
        self._fit(sampled)
        self.tokens[slot, :sampled], self.logprobs[slot, :sampled] = sequence.tokens, sequence.logprobs
        self.sequences.append(sequence)
        self.slots, self._fixed = np.append(self.slots, slot), None
        if not sequence.bounds.stop_ids <= self._stops:
            self._stops |= sequence.bounds.stop_ids
            self._stop_array = np.array(sorted(self._stops), np.int64)

    def take(self, sequence: Sequence, version: int) -> None:
        """The sequence gets what it has sampled. version: of the tokens since it joined."""
        slot, sampled = sequence.slot, int(self.sampled[sequence.slot])
        if sampled > len(sequence.tokens):
            sequence.versions.append((version, sampled - len(sequence.tokens)))
        sequence.tokens = self.tokens[slot, :sampled].copy()
        sequence.logprobs = self.logprobs[slot, :sampled].copy()

    def reorder(self, order: np.ndarray) -> None:
        """order: the old place of each row that is left."""
        self.sequences = [self.sequences[row] for row in order.tolist()]
        self.slots, self._fixed = self.slots[order], None
        if not len(order):
            self._stops, self._stop_array = set(), self._stop_array[:0]

    def ids(self, row: int) -> np.ndarray:
        """The keys of all tokens of a running sequence so far."""
        slot = self.slots[row]
        return self.sequences[row].ids(self.tokens[slot, : self.sampled[slot]])

    def append(self, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """One token of each row; returns the rows that may end with it: at their limit, or with a token that is a stop
        id of any row."""
        slots, at = self.slots, self.sampled[self.slots]
        self._fit(int(at.max()) + 1)
        self.tokens[slots, at], self.logprobs[slots, at] = tokens, logprobs
        self.last[slots] = tokens
        for count in (self.length, self.position, self.sampled):
            count[slots] += 1
        may_end = (at + 1 >= self.limit[slots]) | self.is_special[slots]
        return np.flatnonzero(may_end | (tokens[:, None] == self._stop_array).any(1))

    def _fit(self, sampled: int) -> None:
        if sampled > self.tokens.shape[1]:
            more = max(_MORE_TOKENS, self.tokens.shape[1] // 2, sampled - self.tokens.shape[1])
            self.tokens, self.logprobs = (_padded(x, 0, more) for x in (self.tokens, self.logprobs))

    def _grow(self, size: int) -> None:
        more = max(8, len(self.length) // 2, size - len(self.length))
        self._set_fields(np.concatenate([self._fields, np.zeros(more, _FIELDS)]))
        self.tokens, self.logprobs = (_padded(x, more, 0) for x in (self.tokens, self.logprobs))

    def _set_fields(self, fields: np.ndarray) -> None:
        self._fields = fields
        self.length, self.cached, self.position, self.sampled, self.limit, self.last, self.seed = (
            fields[name] for name in ("length", "cached", "position", "sampled", "limit", "last", "seed")
        )
        self.offset = fields["offset"]
        self.temperature, self.is_special = fields["temperature"], fields["is_special"]


def _padded(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return np.pad(x, ((0, rows), (0, columns)))
