"""The folder of a run: its name, the checkpoint that the run starts from, and what is moved aside for it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.load import Loaded
from meshrl.config.run import RunSection
from meshrl.config.source import leaves
from meshrl.core.errors import CheckpointError, MeshrlError
from meshrl.core.files import is_there, write_text
from meshrl.core.lookup import similar_names
from meshrl.monitor.notes import NOTES_FILE
from meshrl.monitor.rollout_log import step_files
from meshrl.monitor.sinks import split_lines
from meshrl.monitor.status import STATUS_FILE
from meshrl.monitor.trace import FOLDER as TRACES
from meshrl.run.models import BEST_FILE, restore_best
from meshrl.train.checkpoint_files import (
    MANIFEST,
    read_controller,
    read_manifest,
    remove_leftovers,
    states,
    step_folders,
)


@dataclass(frozen=True, slots=True)
class Start:
    """The state that a run continues from. folder: a checkpoint's tensors; None = the beginning of the run, with the
    weights of model.path. saved: the state of its controller."""

    step: int
    folder: Path | None
    saved: dict[str, Any]

    @property
    def first_repeated_step(self) -> int:
        """The first step whose output the run writes again; the evaluation before the first step has number 0."""
        return self.step + 1 if self.folder is not None else 0

    def is_of(self, run: Path) -> bool:
        """Whether it is a checkpoint of the run in this folder, and not of another one."""
        return self.folder is not None and self.folder.parent.parent.resolve() == (run / "checkpoints").resolve()


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


def choose_start(run: RunSection, folder: Path, kind: str, num_steps: int, note: Callable[[str], None]) -> Start | None:
    """The checkpoint that run.resume selects for the run in `folder`; None for a new run. Changes no file. Call it with
    the folder's lease.

    kind: "train" or "sft". note: receives a line for each damaged checkpoint that is passed over.

    Raises: MeshrlError when the folder contains a run that would be overwritten; CheckpointError when the checkpoint is
    damaged, from another command, or beyond num_steps.
    """
    own = states(folder / "checkpoints")
    if run.resume == "auto":
        return newest_start(folder, kind, num_steps, note)
    if run.resume == "never":
        if own:
            raise MeshrlError(
                f"{folder} contains checkpoints up to step {own[-1][0]}; run.resume=auto continues from there. For a "
                "new run, choose another run.name"
            )
        if (folder / _METRICS).exists() and not _ended_before_its_first_step(folder):
            raise _occupied(folder)
        return None
    start = _read(state_in(Path(run.resume)), kind, num_steps)
    is_own = start.is_of(folder)
    if (folder / _METRICS).exists() and not is_own and not _ended_before_its_first_step(folder):
        raise _occupied(folder)
    if is_own and own[-1][0] > start.step:
        raise MeshrlError(
            f"{folder} has a newer checkpoint, after step {own[-1][0]}; a run that starts from step {start.step} would "
            "overwrite it. Choose another run.name, or continue from the newest with run.resume=auto"
        )
    return start


_METRICS = "metrics.jsonl"
_RESULT = "result.json"  # written when a run ends


def _ended_before_its_first_step(folder: Path) -> bool:
    metrics = folder / _METRICS
    return (folder / _RESULT).is_file() and metrics.is_file() and metrics.stat().st_size == 0


def _occupied(folder: Path) -> MeshrlError:
    return MeshrlError(
        f"{folder} already contains a run; choose another run.name. Or set run.resume=auto, which continues it; "
        "without a checkpoint it starts again, and moves the files of that run to a folder earlier_N"
    )


def similar_runs(missing: Path) -> str:
    """For errors about a folder that is no run: the first of the runs in it, or the most similar ones next to it; "" if
    there are none."""
    if not is_there(missing.parent):
        return ""
    inside = sorted(path.parent for path in missing.glob(f"*/{STATUS_FILE}")) if is_there(missing) else []
    if inside:
        return f". It contains {len(inside)} runs, such as {inside[0]}"
    near = similar_names(missing.name, (path.parent.name for path in missing.parent.glob(f"*/{STATUS_FILE}")))
    return f"; did you mean {' or '.join(str(missing.with_name(name)) for name in near)}?" if near else ""


def state_in(given: Path) -> Path:
    """The folder of tensors: `given` itself, or `state` inside a folder such as checkpoints/step_000100."""
    return given if is_there(given / MANIFEST) else given / "state"


def _read(folder: Path, kind: str, num_steps: int) -> Start:
    saved, step = read_controller(folder), read_manifest(folder).step
    _require_fitting(folder, saved, step, kind, num_steps)
    return Start(step, folder, saved)


def _require_fitting(folder: Path, saved: dict[str, Any], step: int, kind: str, num_steps: int) -> None:
    if saved.get("kind") != kind:
        raise CheckpointError(
            f"{folder} is a checkpoint of `meshrl {saved.get('kind')}`, not of `meshrl {kind}`. To start from "
            f"its model, set model.path to {folder.parent / 'model'} and run.resume to never"
        )
    if step > num_steps:
        steps = "loop.num_steps" if kind == "train" else "sft.num_steps"
        raise CheckpointError(f"{folder} is after step {step}, but this run ends at step {num_steps}; raise {steps}")


def newest_start(
    folder: Path, kind: str, num_steps: int, note: Callable[[str], None], before: int | None = None
) -> Start | None:
    """The newest checkpoint of the run in `folder`, of a step below `before` if that is given. A damaged one is passed
    over, with a note. Raises: CheckpointError when all are damaged, or when the newest is of another command or beyond
    num_steps."""
    first: CheckpointError | None = None
    for step, state in reversed(states(folder / "checkpoints")):
        if before is not None and step >= before:
            continue
        try:
            saved = read_controller(state)
        except CheckpointError as damage:
            first = first or damage
            note(f"checkpoint passed over: {damage}")
            continue
        _require_fitting(state, saved, step, kind, num_steps)
        return Start(step, state, saved)
    if first is not None and before is None:
        raise first
    return None


def set_aside(folder: Path, start: Start | None) -> Path | None:
    """Move what the run in `folder` wrote after `start` to a new folder earlier_N in it, because the run will write it
    again: metrics, rollouts, checkpoints and a best model of later steps; without `start` all that a run writes. Other
    files stay, and with `start` also the notes, because they state why a run returned to an earlier step. Unfinished
    saves are removed. Returns the new folder; None when there was nothing to move."""
    checkpoints, rollouts, metrics = folder / "checkpoints", folder / "rollouts", folder / _METRICS
    numbers = [_number(path) for place in (folder, checkpoints, rollouts) for path in place.glob(EARLIER + "*")]
    aside = folder / f"{EARLIER}{1 + max(numbers, default=0)}"
    step, first_repeated = (start.step, start.first_repeated_step) if start is not None else (-1, 0)
    later = split_lines(metrics, first_repeated)[1] if start is not None and metrics.exists() else ""
    remove_leftovers(checkpoints)
    moved = [path for number, path in step_folders(checkpoints) if number > step]
    moved += step_files(rollouts, first_repeated)
    if start is None:
        moved += [path for name in _OF_A_RUN if (path := folder / name).exists() and not _is_empty(path)]
    for path in moved:
        place = path.parent  # a link may lead to another disk: then the move stays there
        to = place / aside.name if place.is_symlink() else aside / place.relative_to(folder)
        to.mkdir(parents=True, exist_ok=True)
        os.rename(path, to / path.name)
    if start is not None:
        best = restore_best(folder, start.step, start.saved.get("best") if start.is_of(folder) else None)
        for path, text in ((aside / _METRICS, later), (aside / "checkpoints" / BEST_FILE, best)):
            if text:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
    for name in ("config.yaml", _RESULT) if moved or aside.is_dir() or start is None else ():
        if (folder / name).is_file():  # the run replaces them
            aside.mkdir(exist_ok=True)
            shutil.copy2(folder / name, aside / name)
    return aside if moved or aside.is_dir() else None


def bytes_of(folder: Path) -> int:
    """Bytes of the states, models, rollouts and metrics of a run, without those of earlier parts."""
    places = [path for _, path in step_folders(folder / "checkpoints")]
    files = [file for place in places for file in place.rglob("*")]
    files += [folder / _METRICS, *step_files(folder / "rollouts", 0)]
    total = 0
    for file in files:
        with suppress(OSError):  # a link without a target, or a file that another program has removed
            total += file.lstat().st_size
    return total


EARLIER = "earlier_"
_OF_A_RUN = (
    *(_METRICS, f"checkpoints/{BEST_FILE}", _RESULT, "report.html", "view.html", "reward.png", "stacks.txt"),
    *(NOTES_FILE, TRACES, "tensorboard", "wandb"),
)


def _number(path: Path) -> int:
    number = path.name.removeprefix(EARLIER)
    return int(number) if number.isdecimal() else 0


def _is_empty(path: Path) -> bool:
    return path.stat().st_size == 0 if path.is_file() else path.is_dir() and not any(path.iterdir())


def changed_keys(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each key of the config that differs from a checkpoint's config, except run.*."""
    before, after = ({key: value for key, value in leaves(config).items() if value != {}} for config in (was, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not key.startswith("run."):
            yield f"changed since the checkpoint: {key} was {before.get(key)!r}, is {after.get(key)!r}"
