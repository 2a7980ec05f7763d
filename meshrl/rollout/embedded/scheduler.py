"""The scheduler: a first-in first-out queue, a bounded set of running sequences, and the pages that they read.

Over ids and lengths, without tensors. A sequence that joins finds the start of its context in the pages of others: of
its group, of an earlier turn of its conversation, of itself before it was preempted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from meshrl.core.types import Request
from meshrl.rollout.embedded.kv_cache import CacheBound
from meshrl.rollout.embedded.pages import PageTable, Prefix
from meshrl.rollout.embedded.rows import Rows, Sequence

# One in so many pages stays free when a sequence joins others, which will need more; fewer cost preemptions.
SPARE_SHARE = 8


@dataclass(slots=True)
class Prefill:
    """Tokens to compute: int64[C] ids from position `start` of a row on. request: one of those that have this context.
    sequences: which continue after it; their rows need its states, and so does a snapshot."""

    request: Request
    ids: np.ndarray
    start: int
    slot: int
    sequences: list[Sequence]
    snapshot: int | None = None


@dataclass(slots=True)
class Admission:
    """What joins in a step. The last rows are new: first `decoders`, whose context is in the cache but for its last
    token, then as many as are in `sampled`, the prefills from whose last tokens they sample. copies: snapshots to copy
    to new rows: (sequence, snapshot)."""

    prefills: list[Prefill] = field(default_factory=list)
    joined: list[Sequence] = field(default_factory=list)
    decoders: list[Sequence] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    copies: list[tuple[Sequence, int]] = field(default_factory=list)


class Scheduler:
    """max_running: rows decoded together; urgent requests join in any case. prefill_tokens: context tokens computed in
    one step, so that many long prompts do not delay running requests; a single longer context is still admitted, alone.
    has_states: layers pass states from token to token, so a context is shared as far as a snapshot of them, which is
    made where several waiting sequences have the same context."""

    def __init__(self, max_running: int, prefill_tokens: int, bound: CacheBound, table: PageTable, has_states: bool):
        self.max_running, self.prefill_tokens, self.bound, self.table = max_running, prefill_tokens, bound, table
        self.has_states, table.limit = has_states, self.max_pages
        self.waiting: deque[Sequence] = deque()
        self.rows = Rows()
        self.snapshots: dict[bytes, int] = {}  # their rows, by the key of the sequences that need them
        self.version = -1  # of the weights with which the rows sample, and of keys and values
        self.num_preempted = 0
        self._waiting_of_key: Counter[bytes] = Counter()

    @property
    def running(self) -> list[Sequence]:
        return self.rows.sequences

    def max_pages(self) -> int | None:
        """The limit of the page table."""
        return self.bound.max_pages(len(self.rows), len(self.snapshots))

    def submit(self, sequence: Sequence) -> None:
        self._enqueue(sequence)
        (self.waiting.appendleft if sequence.request.is_urgent else self.waiting.append)(sequence)

    def admit(self, version: int, is_ahead: bool) -> Admission:
        """Give each running row a page for its next token, for which the youngest rows are preempted if there is none;
        then admit requests from the head of the queue while there are rows, prefill budget and pages for their
        contexts. Without running rows the first one is admitted in any case. version: of the weights. is_ahead: the
        rows have their pages."""
        self.version, admission, budget = version, Admission(), self.prefill_tokens
        if not is_ahead:
            self._make_room()
        others: list[tuple[Sequence, int, np.ndarray]] = []  # sequences that sample from a prefill
        while self.waiting and (len(self.rows) + len(others) < self.max_running or self.waiting[0].request.is_urgent):
            sequence = self.waiting[0]
            ids = sequence.ids()
            found = self._found(sequence, ids)
            shares = self._waiting_of_key[sequence.key] > 1 and len(ids) > 1 and ids[-1] >= 0
            num_rows = len(self.rows) + len(others)
            pending = len(admission.decoders)  # pages that they will get
            if not self._fits(found, len(ids), num_rows, pending, shares and self.has_states):
                shares = shares and not self.has_states
                if not self._fits(found, len(ids), num_rows, pending, False):
                    if num_rows:
                        break
                    self._clear()
                    found = []
            cached = sum(n for _, n in found)
            end = len(ids) - 1 if shares or cached == len(ids) - 1 > 0 else len(ids)
            if cached < end:
                if admission.prefills and len(ids) - cached > budget:
                    break
                budget -= len(ids) - cached
            self._dequeue(self.waiting.popleft())
            sequence.times.queue_s += sequence.lap()
            sequence.times.cached_tokens += cached
            slot = self.table.join(found, ids[:end])
            if cached < end:
                prefill = Prefill(sequence.request, ids[cached:end], cached, slot, [sequence])
                if shares and self.has_states:
                    prefill.snapshot = self._new_snapshot(sequence.key)
                admission.prefills.append(prefill)
            elif self.has_states:
                self._use_snapshot(admission, sequence)
            if end == len(ids):
                others.append((sequence, slot, ids))
                admission.sampled.append(len(admission.prefills) - 1)
            else:
                admission.decoders.append(sequence)
                self.rows.add(sequence, slot, ids, end)
            admission.joined.append(sequence)
        if admission.decoders:  # after all contexts, so that the pages of shared ones are neighbours
            slots = np.array([sequence.slot for sequence in admission.decoders])
            self.table.extend(slots, self.rows.cached[slots])
        for sequence, slot, ids in others:
            self.rows.add(sequence, slot, ids, len(ids))
        return admission

    def _found(self, sequence: Sequence, ids: np.ndarray) -> Prefix:
        """Pages with the start of the ids, at least the last of which is computed."""
        if self.has_states and sequence.key not in self.snapshots:
            return []
        found = _without_cut_image(self.table.find(ids[:-1]), sequence.request)
        columns = len(found) + -(-(sequence.max_cached - sum(n for _, n in found)) // self.table.page_tokens)
        is_complete = sum(n for _, n in found) == len(ids) - 1
        return found if columns <= self.table.num_columns and (is_complete or not self.has_states) else []

    def _fits(self, found: Prefix, length: int, num_rows: int, pending: int, has_snapshot: bool) -> bool:
        limit = self.bound.max_pages(num_rows + 1, len(self.snapshots) + has_snapshot)
        if limit is None:
            return True
        spare = max(1, limit // SPARE_SHARE) if num_rows else 0
        idle = sum(self.table.readers[page] == 0 for page, _ in found)
        return bool(self.table.num_needed(found, length) + spare + pending <= limit - self.table.num_used - idle)

    def _make_room(self) -> None:
        rows, table = self.rows, self.table
        while len(rows) and len(table.extend(rows.slots, rows.cached[rows.slots])):
            self._preempt(len(rows) - 1)
            self.num_preempted += 1
            if not len(rows):
                table.clear()  # one row fits, if no page that it shared is partly empty
                self.snapshots.clear()

    def reserve_next(self, goes_on: np.ndarray) -> bool:
        """A page for the token after the next one, of the rows that go on; False if there is none."""
        slots = self.rows.slots[goes_on]
        return not len(self.table.extend(slots, self.rows.length[slots]))

    def _preempt(self, row: int) -> None:
        """The sequence waits at the head of the queue with its tokens, and finds its pages again if they are left."""
        sequence = self.rows.sequences[row]
        sequence.times.decode_s += sequence.lap()
        self._leave(sequence, comes_back=True)
        self.rows.reorder(np.delete(np.arange(len(self.rows)), row))
        self._enqueue(sequence)
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence, comes_back: bool) -> None:
        """comes_back: its pages can be found by all its tokens that are in the cache."""
        slot = sequence.slot
        self.rows.take(sequence, self.version)
        if comes_back:
            ids = sequence.ids()
            self.table.register(slot, ids[: min(len(ids) - 1, int(self.rows.cached[slot]))], 0)
        self.table.leave(slot)
        sequence.slot = -1

    def compact(self, gone: Collection[int]) -> np.ndarray:
        """Remove the rows in `gone`, whose sequences get their tokens; returns the old row of each that is left."""
        for row in gone:
            self._leave(self.rows.sequences[row], self.table.keeps_idle)
        is_left = np.ones(len(self.rows), bool)
        is_left[list(gone)] = False
        order = np.flatnonzero(is_left)
        if self.has_states:  # rows from the end fill the gaps, which moves the states of the fewest
            num_left, rows = len(order), np.arange(len(order))
            rows[~is_left[:num_left]] = order[order >= num_left]
            order = rows
        if len(gone):
            self.rows.reorder(order)
        for key in [key for key in self.snapshots if not self._waiting_of_key[key]]:
            del self.snapshots[key]
        return order

    def withdraw(self, ids: Collection[str] | None) -> tuple[list[Sequence], list[int]]:
        """Remove these requests (None = all) from the queue; returns them, and the rows of those that run, for
        `compact`."""
        left = [s for s in self.waiting if ids is None or s.request.id in ids]
        self.waiting = deque(s for s in self.waiting if ids is not None and s.request.id not in ids)
        for sequence in left:
            self._dequeue(sequence)
        return left, [row for row, s in enumerate(self.running) if ids is None or s.request.id in ids]

    def preempt_all(self) -> None:
        """All running sequences return to the head of the queue with their tokens, without a cache."""
        for row in reversed(range(len(self.rows))):
            self._preempt(row)
        self.table.clear()
        self.snapshots.clear()

    def _clear(self) -> None:
        self.table.clear()
        self.snapshots.clear()
        self.bound.clear()

    def _new_snapshot(self, key: bytes) -> int:
        rows = set(self.snapshots.values())
        self.snapshots[key] = next(row for row in range(len(rows) + 1) if row not in rows)
        return self.snapshots[key]

    def _use_snapshot(self, admission: Admission, sequence: Sequence) -> None:
        """The states of its context, from a prefill of this step or of an earlier one."""
        row = self.snapshots[sequence.key]
        for prefill in admission.prefills:
            if prefill.snapshot == row:
                prefill.sequences.append(sequence)
                return
        admission.copies.append((sequence, row))

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.key = sequence.ids().tobytes()
        self._waiting_of_key[sequence.key] += 1

    def _dequeue(self, sequence: Sequence) -> None:
        self._waiting_of_key[sequence.key] -= 1
        if not self._waiting_of_key[sequence.key]:
            del self._waiting_of_key[sequence.key]


def _without_cut_image(found: Prefix, request: Request) -> Prefix:
    """The found pages up to the first image that they have in part: its features are computed all at once."""
    end = sum(n for _, n in found)
    end = min([end, *(start for _, start, length in request.media_spans if start < end < start + length)])
    complete, at = list[tuple[int, int]](), 0
    for page, n in found:
        if at < end:
            complete.append((page, min(n, end - at)))
        at += n
    return complete
