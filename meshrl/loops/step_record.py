"""What a run records of each optimizer step for `meshrl replay`: digests of the results of its phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from meshrl.cluster.actors import UpdateReport
from meshrl.cluster.rows import PlannedRows
from meshrl.core.columns import COLUMNS
from meshrl.monitor.digests import Record
from meshrl.sync.digest import array_digest
from meshrl.train.engine import ShardDigests, StepReport

_COLUMNS = {
    "samples": [each.name for each in COLUMNS if each.made_by in ("flatten", "sampler")],
    "reference logprobs": ["ref_logprobs"],
    "advantages": ["advantages"],
    "loss weights": ["loss_weight"],
    "old logprobs": ["old_logprobs"],
}
_NAMES = [name for names in _COLUMNS.values() for name in names]  # fields of Sample
_PART = 4  # hexadecimal digits of one tensor: they name it, and those of all tensors prove that they are equal


def update_record(part: PlannedRows, gradient: UpdateReport, step: StepReport) -> Record:
    """The record of one optimizer step: a digest of each phase's result in the order of the phases, and of each rank's
    gradients and new weights one of all tensors, followed by the first digits of each."""
    columns = dict(zip(_NAMES, zip(*map(attrgetter(*_NAMES), part.samples)), strict=True))
    of_columns = {
        phase: f"{array_digest(array for name in names for array in columns[name]):016x}"
        for phase, names in _COLUMNS.items()
    }
    of = part.batch_plan
    batches = repr((of.micro_batches, of.num_scored, sorted(of.unscored))).encode()
    return {
        **of_columns,
        "batch plan": f"{array_digest([np.frombuffer(batches, np.uint8)]):016x}",
        "logprobs": [f"{digest:016x}" for digest in gradient.logprobs],
        "gradients": [_text(own.gradients) for own in step.shards],
        "weights": [_text(own.weights) for own in step.shards],
        "computes": sorted({own.computes for own in step.shards}),
    }


def _text(digests: Mapping[str, int]) -> str:
    of_all = array_digest([np.array(list(digests.values()), np.uint64)])
    return f"{of_all:016x}" + "".join(f"{digest:016x}"[-_PART:] for digest in digests.values())


def first_difference(
    recorded: Record, found: Record, shards: Sequence[ShardDigests], only_inputs: bool = False
) -> str | None:
    """The first phase of an optimizer step whose result differs, in words; None if there is none. shards: of `found`,
    for the names of tensors. only_inputs: without the phases whose bits depend on the layout of the ranks."""
    computed = {"reference logprobs", "old logprobs"} if only_inputs else set[str]()
    for phase in [name for name in _COLUMNS if name not in computed] + ["batch plan"] * (not only_inputs):
        if recorded.get(phase) != found[phase]:
            return phase
    for phase in () if only_inputs else ("logprobs", "gradients", "weights"):
        for rank, (was, now) in enumerate(zip(recorded[phase], found[phase], strict=True)):
            if was != now:
                names = {"logprobs": {}, "gradients": shards[rank].gradients, "weights": shards[rank].weights}[phase]
                parts = ([text[i : i + _PART] for i in range(16, len(text), _PART)] for text in (was, now))
                of = next((f" of {name}" for name, a, b in zip(names, *parts) if a != b), "")
                return f"{phase}{of} in rank {rank}"
    return None
