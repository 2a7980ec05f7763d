"""Samples stay in the ranks that work on them: they are sent once with their batch plan, and after that only the fields
that were filled in or changed since (reference logprobs, advantages, loss weights).

A message is pickled by column: the arrays of one field, of all rows, are one array. So pickling copies each array once,
and does not call numpy for each row.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from meshrl.core.types import Sample
from meshrl.train.batch_plan import BatchPlan

_FIELDS = tuple(f.name for f in dataclasses.fields(Sample))
_values = attrgetter(*_FIELDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsMessage:
    """The rows that a rank needs for one command. plan_hash: of the complete batch plan. number: of this batch plan.
    used: the numbers of all batch plans in use; a rank frees the rows of others. micro_batches: this rank's part of the
    plan. samples: its rows, by their index in the plan, when the rank has not got them yet; None = it has them.
    changed: their fields that have changed since they were sent last."""

    plan_hash: str
    number: int
    used: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    samples: dict[int, Sample] | None = None
    changed: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        samples = None
        if self.samples is not None:
            columns = zip(*map(_values, self.samples.values())) if self.samples else []
            samples = [*self.samples], [_column(values) for values in columns]
        by_name: dict[str, list[int]] = {}
        for i, fields in self.changed.items():
            for name in fields:
                by_name.setdefault(name, []).append(i)
        changed = [(name, rows, _column([self.changed[i][name] for i in rows])) for name, rows in by_name.items()]
        return _unpickled, (self.plan_hash, self.number, self.used, self.micro_batches, samples, changed)


def _unpickled(
    plan_hash: str,
    number: int,
    used: tuple[int, ...],
    micro_batches: tuple[tuple[int, ...], ...],
    packed: tuple[list[int], list[Any]] | None,
    packed_changes: list[tuple[str, list[int], Any]],
) -> RowsMessage:
    samples, changed = None, dict[int, dict[str, Any]]()
    if packed is not None:
        indices, columns = packed
        rows = zip(*map(_rows, columns))
        samples = {i: Sample(**dict(zip(_FIELDS, row))) for i, row in zip(indices, rows)}
    for name, indices, column in packed_changes:
        for i, value in zip(indices, _rows(column)):
            changed.setdefault(i, {})[name] = value
    return RowsMessage(
        plan_hash=plan_hash, number=number, used=used, micro_batches=micro_batches, samples=samples, changed=changed
    )


def _column(values: Sequence[Any]) -> tuple[list[int], np.ndarray] | list[Any]:
    """The values of all rows: (lengths, all arrays as one) for arrays of one dtype, else a list."""
    first = values[0]
    if isinstance(first, np.ndarray) and first.ndim:
        kind = (first.dtype, first.shape[1:])
        if all(isinstance(v, np.ndarray) and v.ndim and (v.dtype, v.shape[1:]) == kind for v in values):
            return [len(v) for v in values], np.concatenate(values)
    return [*values]


def _rows(column: tuple[list[int], np.ndarray] | list[Any]) -> Iterable[Any]:
    if isinstance(column, list):
        return column
    lengths, array = column
    return np.split(array, np.cumsum(lengths[:-1]))


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
            rows, changes = batch_plan.rows(index), dict[int, dict[str, Any]]()
            if known is not None:
                changes = {i: changed for i in rows if (changed := _changes(now[i], known.values[i]))}
            return RowsMessage(
                plan_hash=batch_plan.hash,
                number=number,
                used=used,
                micro_batches=batch_plan.micro_batches[index],
                samples={i: samples[i] for i in rows} if known is None else None,
                changed=changes,
            )

        return [message(index) for index in range(len(batch_plan.micro_batches))]


def _changes(now: tuple[Any, ...], before: tuple[Any, ...]) -> dict[str, Any]:
    return {name: value for name, value, old in zip(_FIELDS, now, before) if value is not old}


class RowCache:
    """A rank's own samples of the batch plans in use."""

    def __init__(self) -> None:
        self._samples: dict[int, dict[int, Sample]] = {}  # by the number of their batch plan

    def take(self, message: RowsMessage) -> dict[int, Sample]:
        """This rank's current rows, by their index in the batch plan. Raises: ValueError when it has not got them."""
        self._samples = {number: rows for number, rows in self._samples.items() if number in message.used}
        if message.samples is not None:
            self._samples[message.number] = message.samples
        elif message.number not in self._samples:
            raise ValueError(f"no samples of batch plan {message.number}; this rank has those of {[*self._samples]}")
        rows = self._samples[message.number]
        for i, fields in message.changed.items():
            for name, value in fields.items():
                setattr(rows[i], name, value)
        return rows
