"""Which row comes next: a deterministic order that any place in the run can be resumed at.

An ordinal counts everything a run has drawn, over epochs. Row and epoch are pure functions of it, so the whole state
of a source is one number; the rest of what `state()` holds is there to refuse a resume on other data.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from meshrl.core.errors import DataError
from meshrl.core.types import SCHEMA, Prompt, Sample
from meshrl.data.datasets import SftRow


class RowOrder:
    """ordinal -> row index. Each epoch visits every row once, in an order of its own when shuffle is on."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        if num_rows < 1:
            raise DataError("an order over 0 rows has no next row")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._epoch, self._rows = -1, np.arange(num_rows)

    def row(self, ordinal: int) -> int:
        epoch, place = divmod(ordinal, self.num_rows)
        if self.shuffle and epoch != self._epoch:
            # Raw bits of Philox under a stable sort: numpy promises that stream for ever, and no such thing for
            # Generator.permutation, which a resume under another numpy must not depend on.
            bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.num_rows)
            self._epoch, self._rows = epoch, np.argsort(bits, kind="stable")
        return int(self._rows[place])


class _Source:
    """What PromptSource and SftSource share: the order, the place in it, and its checked state."""

    def __init__(self, digest: str, num_rows: int, seed: int, shuffle: bool):
        self._order = RowOrder(num_rows, seed, shuffle)
        self._digest = digest
        self.next_ordinal = 0

    def _draw(self, n: int) -> list[tuple[int, int]]:
        drawn = [(o, self._order.row(o)) for o in range(self.next_ordinal, self.next_ordinal + n)]
        self.next_ordinal += n
        return drawn

    def state(self) -> dict[str, Any]:
        """Plain JSON: the exact place, and what must be equal for it to mean the same rows."""
        return {"schema": SCHEMA, "next_ordinal": self.next_ordinal, **self._identity()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises: DataError when rows, seed, shuffle or schema are not what they were: the order would be another.
        """
        mine = {"schema": SCHEMA, **self._identity()}
        other = {k: (state.get(k), v) for k, v in mine.items() if state.get(k) != v}
        if other:
            told = "; ".join(f"{k} was {was!r}, is {now!r}" for k, (was, now) in other.items())
            raise DataError(
                f"this checkpoint was made on another data order ({told}), so it can't be resumed to the exact row. "
                "Restore the data file, tokenizer and run.seed, or start a new run."
            )
        self.next_ordinal = int(state["next_ordinal"])

    def _identity(self) -> dict[str, Any]:
        order = self._order
        return {"num_rows": order.num_rows, "seed": order.seed, "shuffle": order.shuffle, "digest": self._digest}


class PromptSource(_Source):
    """An endless stream of prompts: `next(n)` gives the next n with rising ordinals, into the next epoch if need be."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True):
        super().__init__(_digest((p.id, p.ids) for p in prompts), len(prompts), seed, shuffle)
        self._prompts = list(prompts)

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts. A file with fewer rows than n wraps: the same row again, under an ordinal of its own."""
        return [dataclasses.replace(self._prompts[row], ordinal=ordinal) for ordinal, row in self._draw(n)]


class SftSource(_Source):
    """An endless stream of SFT rows as Samples, ready for packing once the loss weights are assigned."""

    def __init__(self, rows: Sequence[SftRow], seed: int, shuffle: bool = True):
        super().__init__(_digest((r.id, r.ids) for r in rows), len(rows), seed, shuffle)
        self._rows = list(rows)

    def next(self, n: int) -> list[Sample]:
        """The next n rows; nothing in them was sampled, so rollout_logprobs is NaN and versions -1 throughout."""
        return [_sft_sample(self._rows[row], ordinal) for ordinal, row in self._draw(n)]


def _sft_sample(row: SftRow, ordinal: int) -> Sample:
    length = len(row.ids)
    return Sample(
        trajectory_id=f"{row.id}@{ordinal}",
        group_id=f"{row.id}@{ordinal}",
        row=0,
        prefix_len=0,
        tokens=row.ids,
        mask=row.mask,
        turn=np.where(row.mask, 0, -1).astype(np.int16),
        rollout_logprobs=np.full(length, np.nan, np.float32),
        versions=np.full(length, -1, np.int32),
        rewards=np.zeros(length, np.float32),
    )


def _digest(rows: Iterable[tuple[str, np.ndarray | None]]) -> str:
    """Of ids and rendered tokens: another tokenizer or template is other data."""
    total = hashlib.sha256()
    for name, ids in rows:
        total.update(name.encode() + b"\0" + (b"" if ids is None else ids.tobytes()) + b"\0")
    return total.hexdigest()[:16]
