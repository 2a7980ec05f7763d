"""The models that a run has written, and the record of the best one. No torch is imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from meshrl.core.best_models import Best, best_file, read_best
from meshrl.core.files import CONTINUE_LATER, output_errors, replacing
from meshrl.train.checkpoint_files import state_folder, step_folders, write_json


def model_folder(run: Path, step: int) -> Path:
    return state_folder(run / "checkpoints", step).with_name("model")


def newest_model(run: Path) -> str | None:
    """The folder of the newest model that the run has written; None if it has none."""
    models = [folder / "model" for _, folder in step_folders(run / "checkpoints")]
    return next((str(model) for model in reversed(models) if model.is_dir()), None)


def replace_best(run: Path, best: Best, is_retained: Callable[[int], bool]) -> None:
    """Record the best model in checkpoints/best.json, and remove that of the former best one. is_retained: whether the
    model of a step is retained in any case.

    best.json always refers to a complete model: it is replaced after the new model is written and before the old one is
    removed. It is a file and not a link, so that it survives copies, archives and file systems without links. Its path
    is relative, so that the run's folder may move.
    """
    former, path = read_best(run), best_file(run)
    own = {"model": os.path.relpath(best.model, path.parent)} if best.step else {}
    with output_errors(path, CONTINUE_LATER):
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as aside:
            write_json(aside, asdict(best) | own)  # flushed to disk, because a resume needs it
    if former is not None and former.step and not is_retained(former.step):
        _remove_models(run, [former.step])


def prune_models(run: Path, keep: int | None) -> None:
    """Remove the models of a run, except the newest `keep` and the best one. None = keep all."""
    steps = [step for step, folder in step_folders(run / "checkpoints") if (folder / "model").is_dir()]
    if keep is not None:
        _remove_models(run, steps[:-keep])


def _remove_models(run: Path, steps: list[int]) -> None:
    """Remove the models of these steps, except the best one."""
    best = read_best(run)
    for step in {*steps} - ({best.step} if best is not None else set()):
        folder = model_folder(run, step)
        with suppress(OSError):  # the folder that remains when this is interrupted is not taken for a model
            shutil.rmtree(folder.rename(folder.with_name("model.aside")))
            folder.parent.rmdir()  # unless it contains a state
