"""The record of the best models of a run, checkpoints/best.json."""

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


def read_bests(run: Path) -> list[Best]:
    """The models in best.json: the best one last, before it those that may become the best one again, because the run
    returns to a state or to an earlier test, each after the ones that it has beaten."""
    path = best_file(run)
    if not path.exists():
        return []
    try:
        saved = read_json(path)
        return [
            Best(
                step := int(one["step"]),
                float(one["score"]),
                str(path.parent / one["model"]) if step else str(one["model"]),
                dict(one.get("evaluation", {})),
            )
            for one in (*saved.get("former", saved.get("others", ())), saved)  # others: of runs before former
        ]
    except (Unreadable, KeyError, TypeError, ValueError, OverflowError) as cause:
        raise CheckpointError(
            f"{path} is damaged: {cause}. Remove it; the run then takes its next evaluation as the best so far"
        ) from cause
