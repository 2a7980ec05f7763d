"""The models that a run has written, and the record of the best one. No torch is imported."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrl.core.best_models import Best, best_file, read_bests
from meshrl.core.files import CONTINUE_LATER, output_errors, replacing
from meshrl.train.checkpoint_files import state_folder, states, step_folders, write_json


def model_folder(run: Path, step: int) -> Path:
    return state_folder(run / "checkpoints", step).with_name("model")


def newest_model(run: Path) -> str | None:
    """The folder of the newest model that the run has written; None if it has none."""
    models = [folder / "model" for _, folder in step_folders(run / "checkpoints")]
    return next((str(model) for model in reversed(models) if model.is_dir()), None)


def replace_best(run: Path, best: Best, is_retained: Callable[[int], bool]) -> None:
    """Record the best model in checkpoints/best.json, and remove the models of former best ones, except those to which
    the run may return: the best of their evaluations now, or at the step of a state. is_retained: whether the model of
    a step is retained in any case.

    best.json always refers to complete models: it is replaced after the new model is written and before an old one is
    removed. It is a file and not a link, so that it survives copies, archives and file systems without links.
    """
    former = read_bests(run)
    bests = [*(one for one in former if one != best), best]
    limits, needed = [*(step for step, _ in states(run / "checkpoints")), math.inf], dict[Any, Best]()
    for one in bests:
        needed |= {(limit, *sorted(one.evaluation.items())): one for limit in limits if one.step <= limit}
    write_bests(run, [one for one in bests if one in needed.values()])
    _remove_models(run, [one.step for one in former if not is_retained(one.step)])


def prune_models(run: Path, keep: int | None) -> None:
    """Remove the models of a run, except the newest `keep` and those in best.json. None = keep all."""
    steps = [step for step, folder in step_folders(run / "checkpoints") if (folder / "model").is_dir()]
    if keep is not None:
        _remove_models(run, steps[:-keep])


def _remove_models(run: Path, steps: list[int]) -> None:
    """Remove the models of these steps, except those in best.json."""
    for step in {*steps} - {one.step for one in read_bests(run)}:
        folder = model_folder(run, step)
        with suppress(OSError):  # the folder that remains when this is interrupted is not taken for a model
            shutil.rmtree(folder.rename(folder.with_name("model.aside")))
            folder.parent.rmdir()  # unless it contains a state


def restore_best(run: Path, step: int) -> str | None:
    """If the run found its best model later than step `step`, restore the one that was the best at that step. Returns
    the text of the replaced best.json, None if it stays."""
    bests = read_bests(run)
    if not bests or bests[-1].step <= step:
        return None
    replaced = best_file(run).read_text(encoding="utf-8")
    if earlier := [one for one in bests if one.step <= step]:
        write_bests(run, earlier)
    else:
        best_file(run).unlink()
    return replaced


def read_best(run: Path, evaluation: dict[str, str] | None = None) -> Best | None:
    """The best model recorded in checkpoints/best.json; None before the first evaluation. evaluation: the best model of
    evaluations with this identity, if they have one that is still there."""
    bests = read_bests(run)
    own = [one for one in bests if evaluation in (None, one.evaluation)][-1:]
    is_there = own == bests[-1:] or all(one.step == 0 or Path(one.model).is_dir() for one in own)
    return own[0] if own and is_there else None


def write_bests(run: Path, bests: Sequence[Best]) -> None:
    """Record these models in best.json, with paths relative to it, so that the run's folder may move."""
    place = best_file(run).parent
    *former, best = [asdict(b) | ({"model": os.path.relpath(b.model, place)} if b.step else {}) for b in bests]
    with output_errors(best_file(run), CONTINUE_LATER):
        place.mkdir(exist_ok=True)
        with replacing(best_file(run)) as aside:
            write_json(aside, best | {"former": former})  # flushed to disk, because a resume needs it
