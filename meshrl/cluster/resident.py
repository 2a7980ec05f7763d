"""Samples stay in the ranks that work on them: they are sent once with their batch plan, and after that only the fields
that were filled in or changed since (reference logprobs, advantages, loss weights)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.core.types import Sample
from meshrl.train.plan import Plan

_FIELDS = tuple(f.name for f in dataclasses.fields(Sample))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsMessage:
    """What a rank needs for one command. samples: its rows, by their index in the step, where the plan is new to it;
    None = it has them. changed: fields of them that are others than when they were sent last."""

    plan: Plan
    samples: dict[int, Sample] | None = None
    changed: dict[int, dict[str, Any]] = field(default_factory=dict)


class SentRows:
    """The controller's record of what the ranks hold."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._sent: list[dict[str, Any]] = []

    def forget(self) -> None:
        """The ranks may hold something else: samples are sent in full next."""
        self._plan = None

    def messages(self, samples: Sequence[Sample], plan: Plan) -> list[RowsMessage]:
        """One for each data index. The plan stands for its samples: it is made anew for others."""
        now = [{name: getattr(sample, name) for name in _FIELDS} for sample in samples]
        indices = range(len(plan.micro_batches))
        if plan is self._plan and len(now) == len(self._sent):
            changed = [
                {name: value for name, value in fields.items() if value is not before[name]}
                for fields, before in zip(now, self._sent, strict=True)
            ]
            found = [
                RowsMessage(plan=plan, changed={i: changed[i] for i in plan.rows(index) if changed[i]})
                for index in indices
            ]
        else:
            found = [RowsMessage(plan=plan, samples={i: samples[i] for i in plan.rows(index)}) for index in indices]
        self._plan, self._sent = plan, now
        return found


class ResidentRows:
    """A rank's own samples of the plan that it was sent last."""

    def __init__(self) -> None:
        self._plan_hash = ""
        self._samples: dict[int, Sample] = {}

    def take(self, message: RowsMessage) -> dict[int, Sample]:
        """This rank's rows as they are now, by their index in the step. Raises: ValueError when it has none of them."""
        if message.samples is not None:
            self._plan_hash, self._samples = message.plan.hash, message.samples
        elif message.plan.hash != self._plan_hash:
            raise ValueError(f"no samples of plan {message.plan.hash} are here; those of {self._plan_hash!r} are")
        for i, fields in message.changed.items():
            for name, value in fields.items():
                setattr(self._samples[i], name, value)
        return self._samples
