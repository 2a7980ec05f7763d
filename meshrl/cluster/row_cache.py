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
    """The rows that a rank needs for one command. number: of this batch plan. used: the numbers of all batch plans in
    use; a rank frees the rows of others. micro_batches, num_scored: this rank's part of the plan. is_new: the rank has
    not got these rows yet. columns: all fields of new rows, by name, else those that have changed since they were sent
    last."""

    number: int
    used: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    num_scored: int
    is_new: bool
    columns: dict[str, Column]


@dataclass(kw_only=True, slots=True)
class _Sent:
    """A batch plan with its number, and of each sample the values of its fields that the ranks have. A plan that no
    object of the step refers to is not used again."""

    batch_plan: weakref.ref[BatchPlan]
    number: int
    values: list[tuple[Any, ...]]


class SentRows:
    """The controller's record of the samples that the ranks have; a step with several updates has a batch plan for
    each."""

    def __init__(self) -> None:
        self._sent: list[_Sent] = []  # in the order of their last use
        self._numbers = itertools.count()

    def forget(self) -> None:
        """The ranks may have other samples now: the next messages contain all samples."""
        self._sent = []

    def forget_last(self) -> None:
        """The samples of the last messages are not used again."""
        del self._sent[-1:]

    def messages(self, samples: Sequence[Sample], batch_plan: BatchPlan) -> list[RowsMessage]:
        """One message for each data index. The same plan object means the same samples: other samples get a new one."""
        now = [_values(sample) for sample in samples]
        known = next((s for s in self._sent if s.batch_plan() is batch_plan and len(s.values) == len(now)), None)
        number = next(self._numbers) if known is None else known.number
        self._sent = [s for s in self._sent if (other := s.batch_plan()) is not None and other is not batch_plan]
        self._sent.append(_Sent(batch_plan=weakref.ref(batch_plan), number=number, values=now))
        used = tuple(s.number for s in self._sent)

        def message(index: int) -> RowsMessage:
            rows = batch_plan.rows(index)
            columns = {name: Column(rows, new) for name, new in zip(_FIELDS, zip(*(now[i] for i in rows)))}
            if known is not None:
                before = zip(*(known.values[i] for i in rows))
                columns = {name: _changed(column, old) for (name, column), old in zip(columns.items(), before)}
            return RowsMessage(
                number=number,
                used=used,
                micro_batches=batch_plan.micro_batches[index],
                num_scored=batch_plan.num_scored,
                is_new=known is None,
                columns={name: column for name, column in columns.items() if column.rows},
            )

        return [message(index) for index in range(len(batch_plan.micro_batches))]


def _changed(column: Column, before: Sequence[Any]) -> Column:
    rows = [(i, new) for i, new, old in zip(column.rows, column.values, before) if new is not old]
    return Column([i for i, _ in rows], [new for _, new in rows])


class RowCache:
    """A rank's own samples of the batch plans in use."""

    def __init__(self) -> None:
        self._samples: dict[int, dict[int, Sample]] = {}  # by the number of their batch plan

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
            raise ValueError(f"no samples of batch plan {message.number}; this rank has those of {[*self._samples]}")
        else:
            for i, values in fields.items():
                for name, value in values.items():
                    setattr(self._samples[message.number][i], name, value)
        return self._samples[message.number]
