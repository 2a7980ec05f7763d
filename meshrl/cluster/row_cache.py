"""Samples stay in the ranks that work on them: they are sent once with their batch plan, and after that only the fields
that were filled in or changed since (reference logprobs, advantages, loss weights).
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
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

    rows: Sequence[int]
    values: Sequence[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        first = self.values[0]
        if isinstance(first, np.ndarray) and first.ndim:
            kind = first.dtype, first.shape[1:]
            if all(isinstance(v, np.ndarray) and v.ndim and (v.dtype, v.shape[1:]) == kind for v in self.values):
                return _split, (self.rows, [len(v) for v in self.values], np.concatenate(self.values))
        return Column, (self.rows, self.values)


def _split(rows: Sequence[int], lengths: Sequence[int], array: np.ndarray) -> Column:
    return Column(rows, np.split(array, np.cumsum(lengths[:-1])))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsMessage:
    """The rows that a rank needs for one command. number: of these PlannedRows. used: the numbers of all that are in
    use; a rank frees the rows of others. micro_batches, num_scored: this rank's part of the batch plan. is_new: the
    rank has not got these rows yet. columns: all fields of new rows, by name, else those that have changed since they
    were sent last."""

    number: int
    used: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    num_scored: int
    is_new: bool
    columns: dict[str, Column]


@dataclass(eq=False, kw_only=True, slots=True, weakref_slot=True)
class PlannedRows:
    """The samples of one optimizer step and their batch plan. The ranks keep them while this object exists, or until
    `SentRows.drop`. sent: of each sample, the values of its fields that the ranks have; None before the first
    command."""

    samples: list[Sample]
    batch_plan: BatchPlan
    number: int
    sent: list[tuple[Any, ...]] | None = None


class SentRows:
    """The controller's record of the samples that the ranks have; a step with several updates has rows for each."""

    def __init__(self) -> None:
        self._used: weakref.WeakSet[PlannedRows] = weakref.WeakSet()
        self._numbers = itertools.count()

    def add(self, samples: list[Sample], batch_plan: BatchPlan) -> PlannedRows:
        rows = PlannedRows(samples=samples, batch_plan=batch_plan, number=next(self._numbers))
        self._used.add(rows)
        return rows

    def drop(self, rows: PlannedRows) -> None:
        """These rows are not used again: the ranks free them with the next message."""
        self._used.discard(rows)

    def forget(self) -> None:
        """The ranks may have other samples now: the next messages contain all samples."""
        for rows in self._used:
            rows.sent = None

    def messages(self, rows: PlannedRows) -> list[RowsMessage]:
        """One message for each data index."""
        before, rows.sent = rows.sent, [_values(sample) for sample in rows.samples]
        used, now, batch_plan = tuple(sorted(each.number for each in self._used)), rows.sent, rows.batch_plan

        def message(index: int) -> RowsMessage:
            own = batch_plan.rows(index)
            columns = {name: Column(own, new) for name, new in zip(_FIELDS, zip(*(now[i] for i in own)))}
            if before is not None:
                old = zip(*(before[i] for i in own))
                columns = {name: _changed(column, values) for (name, column), values in zip(columns.items(), old)}
            return RowsMessage(
                number=rows.number,
                used=used,
                micro_batches=batch_plan.micro_batches[index],
                num_scored=batch_plan.num_scored,
                is_new=before is None,
                columns={name: column for name, column in columns.items() if column.rows},
            )

        return [message(index) for index in range(len(batch_plan.micro_batches))]


def _changed(column: Column, before: Sequence[Any]) -> Column:
    rows = [(i, new) for i, new, old in zip(column.rows, column.values, before) if new is not old]
    return Column([i for i, _ in rows], [new for _, new in rows])


class RowCache:
    """A rank's own samples of the PlannedRows in use."""

    def __init__(self) -> None:
        self._samples: dict[int, dict[int, Sample]] = {}  # by the number of their PlannedRows

    def take(self, message: RowsMessage) -> dict[int, Sample]:
        """This rank's current rows, by their index in the batch plan. Raises: ValueError when it has not got them."""
        self._samples = {number: rows for number, rows in self._samples.items() if number in message.used}
        fields: dict[int, dict[str, Any]] = {}
        for name, column in message.columns.items():
            for i, value in zip(column.rows, column.values):
                fields.setdefault(i, {})[name] = value
        if message.is_new:
            self._samples[message.number] = {i: Sample(**values) for i, values in fields.items()}
        elif message.number not in self._samples:
            raise ValueError(f"no samples of rows {message.number}; this rank has those of {[*self._samples]}")
        else:
            for i, values in fields.items():
                for name, value in values.items():
                    setattr(self._samples[message.number][i], name, value)
        return self._samples[message.number]
