"""The folder of a run: its name, the checkpoint that the run starts from, and the removal of files of later steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.load import Loaded
from meshrl.config.run import RunSection
from meshrl.config.source import leaves
from meshrl.core.errors import CheckpointError, MeshrlError
from meshrl.monitor.rollout_log import remove_steps
from meshrl.run.models import restore_best
from meshrl.train.checkpoint_files import MANIFEST, read_controller, read_manifest, remove_leftovers, states


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run starts from. folder: contains its tensors. saved: the state of its controller."""

    step: int
    folder: Path
    saved: dict[str, Any]


def run_name(loaded: Loaded[Any]) -> str:
    """run.name. `auto` = the config's name and the time, with a number if another run began in the same second; the
    folder is created at once, so that no other run can take the name."""
    run = loaded.config.run
    if run.name != "auto":
        return str(run.name)
    first = name = f"{loaded.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        try:
            (Path(run.folder) / name).mkdir(parents=True)
            return name
        except FileExistsError:
            number += 1
            name = f"{first}-{number}"


def choose_start(run: RunSection, folder: Path, kind: str, num_steps: int) -> Start | None:
    """The checkpoint that run.resume selects for the run in `folder`; None for a new run. Changes no file.

    kind: "train" or "sft".

    Raises: MeshrlError when the folder contains a run that would be overwritten; CheckpointError when the checkpoint is
    damaged, from another command, or beyond num_steps.
    """
    own = states(folder / "checkpoints")
    if run.resume == "never" and own:
        raise MeshrlError(
            f"{folder} contains checkpoints up to step {own[-1][0]}; run.resume=auto continues from there. For a new "
            "run, choose another run.name or remove that folder"
        )
    if run.resume == "auto":
        chosen = own[-1][1] if own else None
    else:
        chosen = None if run.resume == "never" else state_in(Path(run.resume))
    is_own = chosen is not None and chosen.parent.parent.resolve() == (folder / "checkpoints").resolve()
    can_take_over = chosen is None and (run.resume == "auto" or _ended_before_its_first_step(folder))
    if (folder / "metrics.jsonl").exists() and not is_own and not can_take_over:
        raise _occupied(folder)
    start = None if chosen is None else _read(chosen, kind, num_steps)
    if start is not None and is_own and own[-1][0] > start.step:
        raise MeshrlError(
            f"{folder} has a newer checkpoint, after step {own[-1][0]}; a run that starts from step {start.step} would "
            "overwrite it. Choose another run.name, or continue from the newest with run.resume=auto"
        )
    return start


def claim(folder: Path, resume: str) -> None:
    """Create the folder for a new run, or take over the folder of a run that ended before its first step.

    Raises: MeshrlError when another run has it: if several runs start at once, only one gets the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if resume == "auto":
            (folder / _RESULT).unlink(missing_ok=True)
        elif _ended_before_its_first_step(folder):
            (folder / _RESULT).unlink()  # of several processes, it succeeds in one only
        else:
            (folder / "metrics.jsonl").touch(exist_ok=False)
    except (FileNotFoundError, FileExistsError):
        raise _occupied(folder) from None


_RESULT = "result.json"  # written when a run ends; without it, a run may still use the folder


def _ended_before_its_first_step(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return (folder / _RESULT).is_file() and metrics.is_file() and metrics.stat().st_size == 0


def _occupied(folder: Path) -> MeshrlError:
    return MeshrlError(f"{folder} already contains a run; choose another run.name, or remove that folder")


def state_in(given: Path) -> Path:
    """The folder of tensors: `given` itself, or `state` inside a folder such as checkpoints/step_000100."""
    return given if (given / MANIFEST).is_file() else given / "state"


def _read(folder: Path, kind: str, num_steps: int) -> Start:
    saved = read_controller(folder)
    if saved.get("kind") != kind:
        raise CheckpointError(
            f"{folder} is a checkpoint of `meshrl {saved.get('kind')}`, not of `meshrl {kind}`. To start from "
            f"its model, set model.path to {folder.parent / 'model'} and run.resume to never"
        )
    step = read_manifest(folder).step
    if step > num_steps:
        steps = "loop.num_steps" if kind == "train" else "sft.num_steps"
        raise CheckpointError(f"{folder} is after step {step}, but this run ends at step {num_steps}; raise {steps}")
    return Start(step, folder, saved)


def newest_start(folder: Path, kind: str, num_steps: int) -> Start | None:
    """The newest checkpoint of the run in `folder`. Raises: CheckpointError when it is damaged."""
    own = states(folder / "checkpoints")
    return _read(own[-1][1], kind, num_steps) if own else None


def remove_later_steps(folder: Path, start: Start | None) -> None:
    """Remove the files that a run wrote after the checkpoint from which it continues, because it will write them again:
    unfinished saves, rollouts, a later best model, and without a checkpoint its metrics (with one, the sink of the
    metrics removes the later lines). Exported models are not removed: each is complete."""
    step = start.step if start is not None else 0
    if (folder / "checkpoints").is_dir():
        remove_leftovers(folder / "checkpoints")
        is_own = start is not None and start.folder.is_relative_to(folder)  # another run's best model is not this one's
        restore_best(folder, step, start.saved.get("best") if start is not None and is_own else None)
    if (folder / "rollouts").is_dir():
        remove_steps(folder / "rollouts", step)
    if step == 0:
        (folder / "metrics.jsonl").unlink(missing_ok=True)


def changed_keys(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each key of the config that differs from a checkpoint's config, except run.*."""
    before, after = ({key: value for key, value in leaves(config).items() if value != {}} for config in (was, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not key.startswith("run."):
            yield f"changed since the checkpoint: {key} was {before.get(key)!r}, is {after.get(key)!r}"
