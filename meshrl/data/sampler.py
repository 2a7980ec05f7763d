"""Which row comes next: a deterministic order that any place in the run can be resumed at.

An ordinal counts everything a run has drawn, over epochs. Row and epoch are pure functions of it, so the whole state
of a source is one number, and of a mixture one for each source; the rest of what `state()` holds is there to refuse a
resume on other data. data/streaming.py does the same for sets larger than memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from meshrl.core.errors import DataError
from meshrl.core.types import SCHEMA, Prompt, Sample
from meshrl.data.datasets import SftRow


class PromptFeed(Protocol):
    """An endless stream of training prompts that can be resumed exactly."""

    @property
    def num_left_out(self) -> int:
        """Rows longer than data.max_prompt_tokens found so far: all at the start if every row is read then, else one
        by one as they are drawn."""
        ...

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts, under ordinals that rise by one."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain JSON: the exact place, and what must be equal for it to mean the same rows."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises: DataError when rows, order or seed are not what they were."""
        ...


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
            self._epoch, self._rows = epoch, permutation(self.num_rows, self.seed, epoch)
        return int(self._rows[place])


def permutation(size: int, *key: int) -> np.ndarray:
    """An order of `size` things, int64[size], by the numbers in `key`.

    Raw bits of Philox under a stable sort: numpy promises that stream for ever, and no such thing for
    Generator.permutation, which a resume under another numpy must not depend on.
    """
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(bits, kind="stable")


def require_same(mine: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises: DataError when a saved state speaks of other rows, or of another order of them, than `mine`."""
    other = {k: (saved.get(k), v) for k, v in mine.items() if saved.get(k) != v}
    if other:
        told = "; ".join(f"{k} was {was!r}, is {now!r}" for k, (was, now) in other.items())
        raise DataError(
            f"this checkpoint was made on another data order ({told}), so it can't be resumed to the exact row. "
            "Restore the data files, the tokenizer, data.* and run.seed, or start a new run."
        )


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
        require_same({"schema": SCHEMA, **self._identity()}, state)
        self.next_ordinal = int(state["next_ordinal"])

    def _identity(self) -> dict[str, Any]:
        order = self._order
        return {"num_rows": order.num_rows, "seed": order.seed, "shuffle": order.shuffle, "digest": self._digest}


class PromptSource(_Source):
    """A PromptFeed over prompts in memory: `next(n)` gives the next n, into the next epoch if need be."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True, num_left_out: int = 0):
        super().__init__(digest_of((p.id, p.ids) for p in prompts), len(prompts), seed, shuffle)
        self._prompts = list(prompts)
        self.num_left_out = num_left_out

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts. A file with fewer rows than n wraps: the same row again, under an ordinal of its own."""
        return [dataclasses.replace(self._prompts[row], ordinal=ordinal) for ordinal, row in self._draw(n)]


class PromptMixture:
    """A PromptFeed that draws from several, each in proportion to its weight: as evenly as whole prompts allow.

    Every draw goes to the source that is furthest behind its share; where each starts is set by the seed. So any
    stretch of the run, a single step too, holds each source to within a prompt or two of its share (independent random
    draws would scatter by the square root of the number drawn). Each source runs through epochs of its own.
    """

    def __init__(self, feeds: Mapping[str, PromptFeed], weights: Mapping[str, float], seed: int):
        total = sum(weights.values())
        self._feeds, self._seed = dict(feeds), seed
        self._shares = {name: weights[name] / total for name in feeds}
        # Raw Philox bits as a fraction: see permutation().
        bits = np.random.Philox(np.random.SeedSequence([seed, len(feeds)])).random_raw(len(feeds))
        self._starts = {name: int(raw) / 2**64 for name, raw in zip(feeds, bits)}
        self._drawn = dict.fromkeys(feeds, 0)

    @property
    def num_left_out(self) -> int:
        return sum(feed.num_left_out for feed in self._feeds.values())

    def next(self, n: int) -> list[Prompt]:
        first = sum(self._drawn.values())
        return [self._one(ordinal) for ordinal in range(first, first + n)]

    def _one(self, ordinal: int) -> Prompt:
        behind = {
            name: share * (ordinal + 1) + self._starts[name] - self._drawn[name] for name, share in self._shares.items()
        }
        name = max(behind, key=lambda name: behind[name])
        self._drawn[name] += 1
        (prompt,) = self._feeds[name].next(1)
        return dataclasses.replace(prompt, ordinal=ordinal)

    def state(self) -> dict[str, Any]:
        sources = {name: {"drawn": self._drawn[name], **feed.state()} for name, feed in self._feeds.items()}
        return {"schema": SCHEMA, **self._identity(), "sources": sources}

    def load_state(self, state: dict[str, Any]) -> None:
        require_same({"schema": SCHEMA, **self._identity()}, state)
        for name, feed in self._feeds.items():
            feed.load_state(state["sources"][name])
            self._drawn[name] = int(state["sources"][name]["drawn"])

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "shares": self._shares}


class SftSource(_Source):
    """An endless stream of SFT rows as Samples, ready for packing once the loss weights are assigned."""

    def __init__(self, rows: Sequence[SftRow], seed: int, shuffle: bool = True):
        super().__init__(digest_of((r.id, r.ids) for r in rows), len(rows), seed, shuffle)
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


def digest_of(rows: Iterable[tuple[str, np.ndarray | None]]) -> str:
    """Of ids and rendered tokens: another tokenizer or template is other data."""
    total = hashlib.sha256()
    for name, ids in rows:
        total.update(name.encode() + b"\0" + (b"" if ids is None else ids.tobytes()) + b"\0")
    return total.hexdigest()[:16]
