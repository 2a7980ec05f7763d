"""The record of the best model of a run, checkpoints/best.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshrl.core.errors import CheckpointError
from meshrl.core.files import Unreadable, read_json


@dataclass(frozen=True, slots=True)
class Best:
    """The highest held-out score of a run, the number of finished steps at that evaluation, and the model: its folder,
    or for step 0 the value of model.path. evaluation: the identity of the evaluation; {} = unknown."""

    step: int
    score: float
    model: str
    evaluation: dict[str, str] = field(default_factory=dict)


def best_file(run: Path) -> Path:
    return run / "checkpoints" / "best.json"


def read_best(run: Path) -> Best | None:
    """The best model of a run by its checkpoints/best.json; None before the first evaluation."""
    path = best_file(run)
    if not path.exists():
        return None
    try:
        saved = read_json(path)
        step, model = int(saved["step"]), str(saved["model"])
        evaluation = dict(saved.get("evaluation", {}))
        return Best(step, float(saved["score"]), str(path.parent / model) if step else model, evaluation)
    except (Unreadable, KeyError, TypeError, ValueError, OverflowError) as cause:
        raise CheckpointError(
            f"{path} is damaged: {cause}. Remove it; the run then takes its next evaluation as the best so far"
        ) from cause
