"""The samples of an optimizer step with their batch plan, and the message in which a command has the rows of a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from meshrl.core.types import Sample
from meshrl.train.batch_plan import BatchPlan

_FIELDS = tuple(f.name for f in dataclasses.fields(Sample))
_values = attrgetter(*_FIELDS)


@dataclass(frozen=True, slots=True)
class Column:
    """One field's values of some rows. Arrays of one dtype are pickled as one array, so that pickling copies each once
    and does not call numpy for each row."""

    values: Sequence[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        first = self.values[0]
        if isinstance(first, np.ndarray) and first.ndim:
            kind = first.dtype, first.shape[1:]
            if all(isinstance(v, np.ndarray) and v.ndim and (v.dtype, v.shape[1:]) == kind for v in self.values):
                return _split, ([len(v) for v in self.values], np.concatenate(self.values))
        return Column, (self.values,)


def _split(lengths: Sequence[int], array: np.ndarray) -> Column:
    return Column(np.split(array, np.cumsum(lengths[:-1])))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsMessage:
    """The rows that a rank needs for one command, and its part of the batch plan. rows: their indices in the plan.
    columns: the values of each field. has_images: of each micro-batch, whether any rank has an image in it."""

    micro_batches: tuple[tuple[int, ...], ...]
    has_images: tuple[bool, ...]
    num_scored: int
    rows: Sequence[int]
    columns: Sequence[Column]

    def samples(self) -> dict[int, Sample]:
        """The rows by their index in the batch plan."""
        of_rows = zip(*(column.values for column in self.columns), strict=True)
        return {i: Sample(**dict(zip(_FIELDS, values))) for i, values in zip(self.rows, of_rows)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRows:
    """The samples of one optimizer step and their batch plan."""

    samples: list[Sample]
    batch_plan: BatchPlan

    def num_without_gradient(self) -> int:
        """The number of rows without a gradient, scored or not."""
        scored = (of_rank[: self.batch_plan.num_scored] for of_rank in self.batch_plan.micro_batches)
        return len(self.batch_plan.unscored) + sum(len(micro) for of_rank in scored for micro in of_rank)

    def message(self, data_index: int) -> RowsMessage:
        """The message to the ranks with this data index."""
        own = self.batch_plan.rows(data_index)
        of_ranks = zip(*self.batch_plan.micro_batches, strict=True)
        return RowsMessage(
            micro_batches=self.batch_plan.micro_batches[data_index],
            has_images=tuple(any(self.samples[i].media_spans for rows in of_all for i in rows) for of_all in of_ranks),
            num_scored=self.batch_plan.num_scored,
            rows=own,
            columns=[Column(values) for values in zip(*(_values(self.samples[i]) for i in own))],
        )
