"""The model that a user names for eval, chat, convert, init or Run.model: a model's folder, a step's folder of a run,
or a run, which means its best model if an evaluation has recorded one, else its newest. No torch is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.load import is_sft
from meshrl.config.source import HUB_ID
from meshrl.core.best_models import best_file, read_best
from meshrl.core.errors import CheckpointError, ConfigError
from meshrl.core.files import is_there
from meshrl.run.folder import similar_runs, state_in
from meshrl.train.checkpoint_files import MANIFEST, read_controller, step_folders

_MODEL_PATH = re.compile(r"""model(\.path=|=.*[{,]\s*["']?path["']?\s*:)""")  # overrides of this key


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """model: a folder or a hub id; None = model.path of the config. text: the model in words, for a user. run: the
    folder of the run that wrote it, None if it is of no run. step: the number of finished steps of that run. state: a
    checkpoint without a model, from which the model is made; `model` is then the one from which its run started."""

    model: str | None = None
    text: str = "model.path"
    run: Path | None = None
    step: int = 0
    state: Path | None = None

    def overrides(self, given: Sequence[str]) -> list[str]:
        """The given overrides, and that of model.path."""
        if self.model is None:
            return [*given]
        if other := next((text for text in given if _MODEL_PATH.match(text)), None):
            raise ConfigError(f"{other} does not fit: {self.text} is evaluated. Give another model by --model FOLDER")
        return [*given, f"model.path={json.dumps(self.model)}"]


def subject_of(config: Any, model: str | Path | None) -> tuple[Any, Subject]:
    """The config and the subject of an evaluation. A folder in place of the config is one that `find_subject` accepts;
    then the config is the config.yaml of its run."""
    if not isinstance(config, str | Path) or not Path(config).is_dir():
        return config, Subject() if model is None else find_subject(model)
    subject = find_subject(config)
    if subject.run is None or not is_there(subject.run / "config.yaml"):
        raise ConfigError(
            f"{config} is a folder, and belongs to no run with a config.yaml; give a config file, and the folder by "
            f"--model: meshrl eval CONFIG --model {config}"
        )
    if is_sft(subject.run / "config.yaml"):
        raise ConfigError(
            f"{subject.run} is a run of meshrl sft, whose config has no rewards; give the config of meshrl train, and "
            f"this run by --model: meshrl eval CONFIG --model {config}"
        )
    return subject.run / "config.yaml", subject if model is None else find_subject(model)


def find_subject(given: str | Path) -> Subject:
    """The model that a folder or a hub id names. A run's folder names its best model, or if it has none its newest."""
    folder = Path(given)
    run = folder.parent if folder.resolve().name == "checkpoints" else folder
    if folder.is_file():
        raise ConfigError(
            f"{given} is a file, not a model's folder; a GGUF file becomes one by: meshrl convert {given} OUT"
        )
    if not folder.is_dir():
        if not HUB_ID.fullmatch(str(given)) or is_there(folder.parent):
            kinds = "a model's folder, runs/NAME, or a hub id, which is written organisation/name"
            raise ConfigError(f"{given} does not exist; give {kinds}{similar_runs(folder)}")
        return Subject(model=str(given), text=str(given))
    if (folder / "config.json").is_file():
        owner, at = _run_and_step(folder.resolve().parent)
        return Subject(model=str(folder), text=str(folder), run=owner, step=at)
    if _is_saved(folder):
        return _of_step(folder, str(folder))
    steps = [path for _, path in step_folders(run / "checkpoints")]
    saved = [path for path in steps if _is_saved(path)]
    if not saved and not is_there(best_file(run)):
        raise ConfigError(
            f"{folder} is neither a model (it has no config.json), nor a run or a step of a run that has saved one. "
            "Give a folder made by save_pretrained, runs/NAME, or runs/NAME/checkpoints/step_N"
        )
    latest = max(saved, key=lambda path: ((path / "model").is_dir(), saved.index(path)), default=None)
    best = read_best(run)
    if best is not None and (best.step == 0 or Path(best.model).is_dir()):
        when = f"after {best.step} steps" if best.step else "the one before training"
        other = f"; the newest is in {latest}" if latest is not None and Path(best.model).parent != latest else ""
        text = f"{best.model}, the best model of {run} ({when}, held-out score {best.score:.4g}{other})"
        return Subject(model=best.model, text=text, run=run, step=best.step)
    if latest is None:
        raise CheckpointError(f"{best_file(run)} names a model that is gone, and no other is there")
    return _of_step(latest, f"{latest}, the newest of {run}")


def _is_saved(folder: Path) -> bool:
    return (folder / "model").is_dir() or is_there(state_in(folder) / MANIFEST)


def _of_step(folder: Path, text: str) -> Subject:
    """A step's folder: its model, or if it has only a state, the model that is made of that."""
    if (folder / "model").is_dir():
        run, step = _run_and_step(folder.resolve())
        return Subject(model=str(folder / "model"), text=text, run=run, step=step)
    state = state_in(folder)
    run, step = _run_and_step(state.resolve().parent)
    saved = read_controller(state)
    try:
        start = str(saved["config"]["model"]["path"])
    except (KeyError, TypeError) as cause:
        raise CheckpointError(f"{state} does not contain the config of its run; it is damaged") from cause
    return Subject(model=start, text=f"{text} (a training state)", run=run, step=step, state=folder)


def _run_and_step(folder: Path) -> tuple[Path | None, int]:
    """The run and the step of a folder runs/NAME/checkpoints/step_N; (None, 0) if it is no such folder."""
    step = {path: number for number, path in step_folders(folder.parent)}.get(folder)
    is_step = step is not None and folder.parent.name == "checkpoints"
    return (folder.parent.parent, step or 0) if is_step else (None, 0)
