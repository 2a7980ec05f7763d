"""The models that a run has written, and the record of the best one in checkpoints/best.json. No torch is imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.core.errors import CheckpointError
from meshrl.core.files import CONTINUE_LATER, Unreadable, output_errors, read_json, replacing
from meshrl.train.checkpoint_files import read_controller, state_folder, states, step_folders, write_json

BEST_FILE = "best.json"


@dataclass(frozen=True, slots=True)
class Best:
    """The highest held-out score of a run, the number of finished steps at that evaluation, and the model: its folder,
    or for step 0 the value of model.path. evaluation: the identity of the evaluation; {} = unknown."""

    step: int
    score: float
    model: str
    evaluation: dict[str, str] = field(default_factory=dict)


def model_folder(run: Path, step: int) -> Path:
    return state_folder(run / "checkpoints", step).with_name("model")


def newest_model(run: Path) -> str | None:
    """The folder of the newest model that the run has written; None if it has none."""
    models = [folder / "model" for _, folder in step_folders(run / "checkpoints")]
    return next((str(model) for model in reversed(models) if model.is_dir()), None)


def replace_best(run: Path, best: Best, is_retained: Callable[[int], bool]) -> None:
    """Record the best model in checkpoints/best.json, and remove the former best models, unless a checkpoint records
    them as its best. is_retained: whether the model of a step is retained in any case.

    best.json always refers to a complete model: it is replaced after the new model is written and before an old one is
    removed. It is a file and not a link, so that it survives copies, archives and file systems without links.
    """
    former = best_facts(run) or {}
    others = former.pop("others", [])
    if former and former.get("evaluation", {}) != best.evaluation:
        others.append(_facts(former))
    beaten = {*former.get("beaten", ()), former["step"]} if former else set()
    beaten |= {other["step"] for other in others if other["evaluation"] == best.evaluation} - {best.step}
    others = [other for other in others if other["evaluation"] != best.evaluation]
    model = best.model
    if best.step:  # relative, so that the run's folder may move
        model = os.path.relpath(model, _best_file(run).parent)
    best_model = {"step": best.step, "score": best.score, "evaluation": best.evaluation, "model": model}
    write_best(run, {**best_model, "beaten": sorted(beaten & _best_of_states(run)), "others": others})
    _remove_models(run, [step for step in beaten if not is_retained(step)])


def prune_models(run: Path, keep: int | None) -> None:
    """Remove the models of a run, except the newest `keep` and those that best.json or a checkpoint records as the
    best. None = keep all."""
    steps = [step for step, folder in step_folders(run / "checkpoints") if (folder / "model").is_dir()]
    if keep is not None:
        _remove_models(run, steps[:-keep])


def _remove_models(run: Path, steps: list[int]) -> None:
    """Remove the models of these steps, except those that best.json or a checkpoint records as the best."""
    if not steps:
        return
    best = best_facts(run)
    retained = {one["step"] for one in (best, *best["others"])} if best is not None else set()
    for step in {*steps} - _best_of_states(run) - retained:
        folder = model_folder(run, step)
        with suppress(OSError):  # the folder that remains when this is interrupted is not taken for a model
            shutil.rmtree(folder.rename(folder.with_name("model.aside")))
            folder.parent.rmdir()  # unless it contains a state


def _best_of_states(run: Path) -> set[int]:
    """The steps whose models the checkpoints record as the best ones."""
    steps = set()
    for _, folder in states(run / "checkpoints"):
        with suppress(CheckpointError):  # damaged: no run continues from there
            best = read_controller(folder).get("best")
            if best is not None:
                steps.add(best["step"])
    return steps


def restore_best(run: Path, step: int, best: dict[str, Any] | None) -> str | None:
    """If the run found its best model later than step `step`, restore `best`, which was the best at that step. Returns
    the text of the replaced best.json, None if it stays. Other former best models are removed when the best model
    changes again."""
    now = best_facts(run)
    if now is None or now["step"] <= step:
        return None
    replaced = _best_file(run).read_text(encoding="utf-8")
    if best is None:
        _best_file(run).unlink()
    else:
        write_best(run, best)
    return replaced


def read_best(run: Path, evaluation: dict[str, str] | None = None) -> Best | None:
    """The best model recorded in checkpoints/best.json; None before the first evaluation. evaluation: the best model of
    evaluations with this identity, if they have one that is still there."""
    saved = best_facts(run)
    if saved is not None and evaluation is not None and saved.get("evaluation", {}) != evaluation:
        saved = next((one for one in saved["others"] if one["evaluation"] == evaluation), None)
        if saved is not None and saved["step"] and not (_best_file(run).parent / saved["model"]).is_dir():
            return None
    if saved is None:
        return None
    model = str(_best_file(run).parent / saved["model"]) if saved["step"] else saved["model"]
    return Best(saved["step"], saved["score"], model, saved.get("evaluation", {}))


def best_facts(run: Path) -> dict[str, Any] | None:
    """Contents of best.json: step, score, evaluation, model, beaten (steps of former best ones that states need),
    others (the best ones of evaluations with other identities: step, score, evaluation, model)."""
    path = _best_file(run)
    if not path.exists():
        return None
    try:
        saved = read_json(path)
        return saved | _facts(saved) | {"others": [_facts(other) for other in saved.get("others", ())]}
    except (Unreadable, KeyError, TypeError, ValueError, OverflowError) as cause:
        raise CheckpointError(
            f"{path} is damaged: {cause}. Remove it; the run then takes its next evaluation as the best so far"
        ) from cause


def _facts(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Those of one best model."""
    facts = {"step": int(saved["step"]), "score": float(saved["score"]), "model": str(saved["model"])}
    return facts | {"evaluation": dict(saved.get("evaluation", {}))}


def write_best(run: Path, content: dict[str, Any]) -> None:
    with output_errors(_best_file(run), CONTINUE_LATER):
        _best_file(run).parent.mkdir(exist_ok=True)
        with replacing(_best_file(run)) as aside:
            write_json(aside, content)  # flushed to disk, because a resume needs it


def _best_file(run: Path) -> Path:
    return run / "checkpoints" / BEST_FILE
