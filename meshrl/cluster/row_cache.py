"""Samples stay in the ranks that work on them: they are sent once with their batch plan, and after that only the fields
that were filled in or changed since (reference logprobs, advantages, loss weights)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.core.types import Sample
from meshrl.train.batch_plan import BatchPlan

_FIELDS = tuple(f.name for f in dataclasses.fields(Sample))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsMessage:
    """The rows that a rank needs for one command. samples: its rows, by their index in the step, when the rank has not
    got this batch plan yet; None = it has them. changed: their fields that have changed since they were sent last."""

    batch_plan: BatchPlan
    samples: dict[int, Sample] | None = None
    changed: dict[int, dict[str, Any]] = field(default_factory=dict)


class SentRows:
    """The controller's record of the samples that the ranks have."""

    def __init__(self) -> None:
        self._batch_plan: BatchPlan | None = None
        self._sent: list[dict[str, Any]] = []

    def forget(self) -> None:
        """The ranks may have other samples now: the next message contains all samples."""
        self._batch_plan = None

    def messages(self, samples: Sequence[Sample], batch_plan: BatchPlan) -> list[RowsMessage]:
        """One message for each data index. The same plan object means the same samples: other samples get a new one."""
        now = [{name: getattr(sample, name) for name in _FIELDS} for sample in samples]
        indices = range(len(batch_plan.micro_batches))
        if batch_plan is self._batch_plan and len(now) == len(self._sent):
            changed = [
                {name: value for name, value in fields.items() if value is not before[name]}
                for fields, before in zip(now, self._sent, strict=True)
            ]
            found = [
                RowsMessage(
                    batch_plan=batch_plan, changed={i: changed[i] for i in batch_plan.rows(index) if changed[i]}
                )
                for index in indices
            ]
        else:
            found = [
                RowsMessage(batch_plan=batch_plan, samples={i: samples[i] for i in batch_plan.rows(index)})
                for index in indices
            ]
        self._batch_plan, self._sent = batch_plan, now
        return found


class RowCache:
    """A rank's own samples of the batch plan that it received last."""

    def __init__(self) -> None:
        self._batch_plan_hash = ""
        self._samples: dict[int, Sample] = {}

    def take(self, message: RowsMessage) -> dict[int, Sample]:
        """This rank's current rows, by their index in the step. Raises: ValueError when it has another batch plan."""
        if message.samples is not None:
            self._batch_plan_hash, self._samples = message.batch_plan.hash, message.samples
        elif message.batch_plan.hash != self._batch_plan_hash:
            raise ValueError(
                f"no samples of batch plan {message.batch_plan.hash}; this rank has those of {self._batch_plan_hash!r}"
            )
        for i, fields in message.changed.items():
            for name, value in fields.items():
                setattr(self._samples[i], name, value)
        return self._samples
