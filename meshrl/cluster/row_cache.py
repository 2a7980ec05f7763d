"""Samples stay in the ranks that work on them: they are sent once with their batch plan, and after that only the fields
that were filled in or changed since (reference logprobs, advantages, loss weights).

A message is pickled by column: the arrays of one field, of all rows, are one array. So pickling copies each array once,
and does not call numpy for each row.
"""

from __future__ import annotations

import dataclasses
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
    """The rows that a rank needs for one command. plan_hash: of the complete batch plan. micro_batches: this rank's
    part of it. samples: its rows, by their index in the step, when the rank has not got this batch plan yet; None = it
    has them. changed: their fields that have changed since they were sent last."""

    plan_hash: str
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
        return _unpickled, (self.plan_hash, self.micro_batches, samples, changed)


def _unpickled(
    plan_hash: str,
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
    return RowsMessage(plan_hash=plan_hash, micro_batches=micro_batches, samples=samples, changed=changed)


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


class SentRows:
    """The controller's record of the samples that the ranks have."""

    def __init__(self) -> None:
        self._batch_plan: BatchPlan | None = None
        self._sent: list[tuple[Any, ...]] = []  # of each sample, the values of its fields

    def forget(self) -> None:
        """The ranks may have other samples now: the next message contains all samples."""
        self._batch_plan, self._sent = None, []

    def messages(self, samples: Sequence[Sample], batch_plan: BatchPlan) -> list[RowsMessage]:
        """One message for each data index. The same plan object means the same samples: other samples get a new one."""
        now = [_values(sample) for sample in samples]
        known = batch_plan is self._batch_plan and len(now) == len(self._sent)

        def message(index: int) -> RowsMessage:
            rows, mine = batch_plan.rows(index), batch_plan.micro_batches[index]
            if not known:
                return RowsMessage(plan_hash=batch_plan.hash, micro_batches=mine, samples={i: samples[i] for i in rows})
            changed = {i: _changes(now[i], self._sent[i]) for i in rows}
            changed = {i: fields for i, fields in changed.items() if fields}
            return RowsMessage(plan_hash=batch_plan.hash, micro_batches=mine, changed=changed)

        found = [message(index) for index in range(len(batch_plan.micro_batches))]
        self._batch_plan, self._sent = batch_plan, now
        return found


def _changes(now: tuple[Any, ...], before: tuple[Any, ...]) -> dict[str, Any]:
    return {name: value for name, value, old in zip(_FIELDS, now, before) if value is not old}


class RowCache:
    """A rank's own samples of the batch plan that it received last."""

    def __init__(self) -> None:
        self._batch_plan_hash = ""
        self._samples: dict[int, Sample] = {}

    def take(self, message: RowsMessage) -> dict[int, Sample]:
        """This rank's current rows, by their index in the step. Raises: ValueError when it has another batch plan."""
        if message.samples is not None:
            self._batch_plan_hash, self._samples = message.plan_hash, message.samples
        elif message.plan_hash != self._batch_plan_hash:
            raise ValueError(
                f"no samples of batch plan {message.plan_hash}; this rank has those of {self._batch_plan_hash!r}"
            )
        for i, fields in message.changed.items():
            for name, value in fields.items():
                setattr(self._samples[i], name, value)
        return self._samples
