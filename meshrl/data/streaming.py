"""Prompts of sets larger than memory: rows are read, rendered and filtered as they are drawn.

Shuffling holds one buffer of rows. Files are cut into chunks; each epoch takes the chunks in an order of its own, fills
the buffer with the next few, and deals it out in a random order. So rows from all over the set meet in one buffer,
although only data.shuffle_buffer_rows of them are held, and the order is a function of seed and position alone: a
resume reads the buffer that it stands in again, and nothing before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshrl.core.errors import DataError
from meshrl.core.types import SCHEMA, Prompt
from meshrl.data.datasets import all_too_long, require_rows
from meshrl.data.sampler import digest_of, permutation, require_same
from meshrl.data.tables import RawRow, Table

CHUNKS_PER_BUFFER = 16
PROBED_ROWS = 8  # rendered at the start, so that another tokenizer or template is seen as other data


class BufferOrder:
    """position -> row. A position counts rows read, over epochs; every epoch reads each row once."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool, buffer_rows: int):
        self.num_rows, self.seed, self.shuffle, self.buffer_rows = num_rows, seed, shuffle, buffer_rows
        self._chunk_rows = max(1, buffer_rows // CHUNKS_PER_BUFFER) if shuffle else buffer_rows
        self._chunks_per_buffer = min(CHUNKS_PER_BUFFER, buffer_rows) if shuffle else 1
        self._epoch, self._chunks, self._starts = -1, np.empty(0, np.int64), np.empty(0, np.int64)

    def buffer(self, position: int) -> tuple[int, list[tuple[int, int]], np.ndarray]:
        """The buffer that a position lies in: (its first position, the stretches of rows in it, the order in which
        those rows, one stretch after the other, are dealt out)."""
        epoch, place = divmod(position, self.num_rows)
        self._enter(epoch)
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        first = number * self._chunks_per_buffer
        begins = [int(chunk) * self._chunk_rows for chunk in self._chunks[first : first + self._chunks_per_buffer]]
        stretches = [(begin, min(begin + self._chunk_rows, self.num_rows)) for begin in begins]
        size = sum(end - begin for begin, end in stretches)
        # From 1: SeedSequence takes [seed, epoch, 0] and [seed, epoch], which orders the chunks, for the same.
        order = permutation(size, self.seed, epoch, number + 1) if self.shuffle else np.arange(size)
        return position - place + int(self._starts[number]), stretches, order

    def _enter(self, epoch: int) -> None:
        """Order the chunks of an epoch; only the last of the set may be short, and it may lie in any buffer."""
        if epoch == self._epoch:
            return
        num_chunks = -(-self.num_rows // self._chunk_rows)
        chunks = permutation(num_chunks, self.seed, epoch) if self.shuffle else np.arange(num_chunks)
        sizes = np.full(num_chunks, self._chunk_rows, np.int64)
        sizes[chunks == num_chunks - 1] = self.num_rows - (num_chunks - 1) * self._chunk_rows
        ends = np.cumsum(sizes)
        starts = np.concatenate([[0], ends[self._chunks_per_buffer - 1 : -1 : self._chunks_per_buffer]])
        self._epoch, self._chunks, self._starts = epoch, chunks, starts


class PromptStream:
    """A PromptFeed that holds one buffer of rows of a table. A bad row is an error when it is drawn, by file and line.

    make: RawRow and ordinal -> rendered Prompt. Ordinals count what is kept, positions what is read.
    """

    def __init__(
        self,
        table: Table,
        make: Callable[[RawRow, int], Prompt],
        max_prompt_tokens: int,
        *,
        seed: int,
        shuffle: bool,
        buffer_rows: int,
    ):
        require_rows(table, table.num_rows)
        self._table, self._make, self._max_prompt_tokens = table, make, max_prompt_tokens
        self._order = BufferOrder(table.num_rows, seed, shuffle, buffer_rows)
        self._digest = _digest(table, make)
        self._first, self._buffer = 0, list[RawRow]()  # the buffer's first position, and its rows as they are dealt out
        self.next_ordinal, self.position, self.num_left_out = 0, 0, 0

    def next(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        too_long: list[int] = []
        while len(prompts) < n:
            prompt = self._make(self._row(), self.next_ordinal)
            self.position += 1
            length = len(prompt.ids) if prompt.ids is not None else 0
            if length <= self._max_prompt_tokens:
                self.next_ordinal += 1
                prompts.append(prompt)
                too_long.clear()
                continue
            self.num_left_out += 1
            too_long.append(length)
            if len(too_long) >= self._order.num_rows:
                raise all_too_long(self._table.name, too_long, "data.max_prompt_tokens", self._max_prompt_tokens)
        return prompts

    def _row(self) -> RawRow:
        place = self.position - self._first
        if not 0 <= place < len(self._buffer):
            self._first, stretches, order = self._order.buffer(self.position)
            rows = [row for begin, end in stretches for row in self._table.rows(begin, end)]
            if len(rows) != len(order):
                raise DataError(
                    f"{self._table.name} holds fewer rows than when the run began: it was changed. Restore it, or "
                    "start a new run."
                )
            self._buffer = [rows[i] for i in order]
            place = self.position - self._first
        return self._buffer[place]

    def state(self) -> dict[str, Any]:
        place = {"next_ordinal": self.next_ordinal, "position": self.position, "num_left_out": self.num_left_out}
        return {"schema": SCHEMA, **place, **self._identity()}

    def load_state(self, state: dict[str, Any]) -> None:
        require_same({"schema": SCHEMA, **self._identity()}, state)
        self.next_ordinal, self.position = int(state["next_ordinal"]), int(state["position"])
        self.num_left_out = int(state["num_left_out"])

    def _identity(self) -> dict[str, Any]:
        order = self._order
        return {
            "num_rows": order.num_rows,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "buffer_rows": order.buffer_rows,
            "max_prompt_tokens": self._max_prompt_tokens,
            "digest": self._digest,
        }


def _digest(table: Table, make: Callable[[RawRow, int], Prompt]) -> str:
    """Of the first rows as rendered, and of what the table says of itself: the rest of it is not read for this."""
    prompts = [make(raw, 0) for raw in table.rows(0, PROBED_ROWS)]
    fingerprint = np.frombuffer(repr(table.fingerprint()).encode(), np.uint8)
    return digest_of([*((p.id, p.ids) for p in prompts), ("fingerprint", fingerprint)])
