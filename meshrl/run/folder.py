"""The folder of a run: its lease, its name, the checkpoint that the run starts from, what is moved aside for it, its
models, and the record of the best one. No torch is imported."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.config.load import Loaded
from meshrl.config.monitor import TRACKERS
from meshrl.config.run import RunSection
from meshrl.config.source import Reader, content, leaves
from meshrl.core.best_models import best_file, read_best
from meshrl.core.errors import CheckpointError, ConfigError, MeshrlError
from meshrl.core.files import is_there, write_text
from meshrl.core.lookup import similar_names
from meshrl.core.terminal import print_message
from meshrl.monitor.digests import DIGESTS_FILE
from meshrl.monitor.notes import NOTES_FILE
from meshrl.monitor.recorder import FOLDER as TRACES
from meshrl.monitor.rollout_log import step_files
from meshrl.monitor.sinks import split_lines
from meshrl.monitor.status import STATUS_FILE, Status, read_status
from meshrl.process.diagnosis import has_open
from meshrl.train.checkpoint_files import (
    MANIFEST,
    read_controller,
    read_manifest,
    remove_leftovers,
    states,
    step_folders,
)

_METRICS, _EARLIER = "metrics.jsonl", "earlier_"
_RESULT = "result.json"  # written when a run ends
LOGS = "logs"  # of servers that ranks have started
OTHER_FOLDER = "Choose another run.folder or run.name, make room, or make the folder writable"
_OF_A_RUN = (
    *(_METRICS, DIGESTS_FILE, "checkpoints/best.json", _RESULT, "report.html", "view.html", "stacks.txt"),
    *(NOTES_FILE, TRACES, LOGS, *TRACKERS, "rollouts/images"),
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


def config_of(run: Path | None) -> dict[str, Any]:
    """The config.yaml of a run; {} if there is none that can be read."""
    if run is not None:
        with suppress(ConfigError):
            return dict(content(Reader(run).files(run / "config.yaml")[0]))
    return {}


def with_date(loaded: Loaded[Any], former: Mapping[str, Any]) -> Loaded[Any]:
    """The config with a value of run.date: its own, that of the run whose config is `former`, or now."""
    run = loaded.config.run
    if run.date is not None:
        return loaded
    date = former.get("run", {}).get("date") or datetime.now().isoformat(timespec="seconds")
    section = run.model_copy(update={"date": datetime.fromisoformat(date)})
    config = loaded.config.model_copy(update={"run": section})
    return replace(loaded, config=config, origins=loaded.origins | {"run.date": "start of the run"})


def choose_start(run: RunSection, folder: Path, kind: str, num_steps: int, note: Callable[[str], None]) -> Start | None:
    """The checkpoint that run.resume selects for the run in `folder`; None for a new run. Changes no file. Call it with
    the folder's lease.

    kind: "train" or "sft". note: receives a line for each damaged checkpoint that is passed over.
    """
    if run.resume == "auto":
        return newest_start(folder, kind, num_steps, note)
    newest = max((step for step, _ in states(folder / "checkpoints")), default=0)
    start = None
    if run.resume != "never":
        state = state_in(Path(run.resume))
        start = Start(read_manifest(state).step, state, read_controller(state))
        _require_fitting(start, kind, num_steps)
    elif newest:
        raise MeshrlError(
            f"{folder} contains checkpoints up to step {newest}; run.resume=auto continues from there. For a "
            "new run, choose another run.name"
        )
    if start is not None and start.is_of(folder):
        if newest > start.step:
            raise MeshrlError(
                f"{folder} has a newer checkpoint, after step {newest}; a run that starts from step {start.step} would "
                "overwrite it. Choose another run.name, or continue from the newest with run.resume=auto"
            )
    elif (metrics := folder / _METRICS).exists() and not ((folder / _RESULT).is_file() and _is_empty(metrics)):
        raise MeshrlError(  # a run that ended before its first step occupies no name
            f"{folder} already contains a run; choose another run.name. Or set run.resume=auto, which continues it; "
            "without a checkpoint it starts again, and moves the files of that run to a folder earlier_N"
        )
    return start


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


def state_in(folder: Path) -> Path:
    """The folder of tensors: `given` itself, or `state` inside a folder such as checkpoints/step_000100."""
    return folder if is_there(folder / MANIFEST) else folder / "state"


def _require_fitting(start: Start, kind: str, num_steps: int) -> None:
    """Raises: CheckpointError when it is a checkpoint of another command, or beyond num_steps."""
    assert start.folder is not None
    if (saved_kind := start.saved.get("kind")) != kind:
        raise CheckpointError(
            f"{start.folder} is a checkpoint of `meshrl {saved_kind}`, not of `meshrl {kind}`. To start from "
            f"its model, set model.path to {start.folder.parent / 'model'} and run.resume to never"
        )
    if start.step > num_steps:
        steps = "loop.num_steps" if kind == "train" else "sft.num_steps"
        raise CheckpointError(
            f"{start.folder} is after step {start.step}, but this run ends at step {num_steps}; raise {steps}"
        )


def newest_start(
    folder: Path, kind: str, num_steps: int, note: Callable[[str], None], before: int | None = None
) -> Start | None:
    """The newest checkpoint of the run in `folder`, of a step below `before` if that is given. A damaged one is passed
    over, with a note."""
    first: CheckpointError | None = None
    for step, state in reversed(states(folder / "checkpoints")):
        if before is not None and step >= before:
            continue
        try:
            start = Start(step, state, read_controller(state))
        except CheckpointError as damage:
            first = first or damage
            note(f"checkpoint passed over: {damage}")
            continue
        _require_fitting(start, kind, num_steps)
        return start
    if first is not None and before is None:
        raise first
    return None


def set_aside(folder: Path, start: Start | None) -> Path | None:
    """Move what the run in `folder` wrote after `start` to a new folder earlier_N in it, because the run will write it
    again: metrics, rollouts, checkpoints and a best model of later steps; without `start` all that a run writes. Other
    files stay, and with `start` also the notes, because they state why a run returned to an earlier step. Unfinished
    saves are removed. Returns the new folder; None when there was nothing to move."""
    checkpoints, rollouts = folder / "checkpoints", folder / "rollouts"
    asides = [path for parent in (folder, checkpoints, rollouts) for path in parent.glob(_EARLIER + "*")]
    numbers = [int(number) for path in asides if (number := path.name.removeprefix(_EARLIER)).isdecimal()]
    aside = folder / f"{_EARLIER}{1 + max(numbers, default=0)}"
    step, first_repeated = (start.step, start.first_repeated_step) if start is not None else (-1, 0)
    lines = {name: step + 1 if name == DIGESTS_FILE else first_repeated for name in (_METRICS, DIGESTS_FILE)}
    if start is None:
        lines = {}
    later = {name: split_lines(folder / name, first)[1] for name, first in lines.items() if (folder / name).exists()}
    remove_leftovers(checkpoints)
    moved = [path for number, path in step_folders(checkpoints) if number > step]
    moved += step_files(rollouts, first_repeated)
    if start is not None and (best := read_best(folder)) is not None and best.step > step:
        moved.append(best_file(folder))
    if start is None:
        moved += [path for name in _OF_A_RUN if (path := folder / name).exists() and not _is_empty(path)]
    for path in moved:
        parent = path.parent  # a link may lead to another disk: then the move stays there
        to = parent / aside.name if parent.is_symlink() else aside / parent.relative_to(folder)
        to.mkdir(parents=True, exist_ok=True)
        os.rename(path, to / path.name)
    for name, text in later.items():
        if text:
            aside.mkdir(exist_ok=True)
            write_text(aside / name, text)
    for name in ("config.yaml", _RESULT) if moved or aside.is_dir() or start is None else ():
        if (folder / name).is_file():  # the run replaces them
            aside.mkdir(exist_ok=True)
            shutil.copy2(folder / name, aside / name)
    return aside if moved or aside.is_dir() else None


def bytes_of(folder: Path) -> int:
    """Bytes of the states, models, rollouts and metrics of a run, without those of earlier parts."""
    places = [path for _, path in step_folders(folder / "checkpoints")]
    files = [file for root in places for file in root.rglob("*")]
    files += [
        folder / _METRICS,
        folder / DIGESTS_FILE,
        *step_files(folder / "rollouts", 0),
        *(folder / "rollouts/images").glob("*.jpg"),
    ]
    total = 0
    for file in files:
        with suppress(OSError):  # a link without a target, or a file that another program has removed
            total += file.lstat().st_size
    return total


def _is_empty(path: Path) -> bool:
    return path.stat().st_size == 0 if path.is_file() else path.is_dir() and not any(path.iterdir())


def changed_keys(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each key of the config that differs from a checkpoint's config, except run.*."""
    before, after = ({key: value for key, value in leaves(config).items() if value != {}} for config in (was, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not key.startswith("run."):
            yield f"changed since the checkpoint: {key} was {before.get(key)!r}, is {after.get(key)!r}"


LOCK_FILE = "run.lock"
_WAIT_S = 60.0  # for a run that is ending, such as a requeued job's
_POLL_S = 0.2


class FolderLease:
    """The lease of one folder, held from `take` to `release`: only the process that holds it writes there, and `meshrl
    status` and `meshrl stop` find out by it whether the run is alive.

    The lease is a lock (flock) on a file in the folder. The kernel releases it when its holder ends, for any reason, so
    neither process ids nor times are compared. Processes on other machines see it where the file system passes locks
    on, as NFS and Lustre do with most mount options (docs/checkpoints.md). On a file system without locks no lease is
    possible; `take` then returns False.
    """

    def __init__(self, folder: Path):
        self.path = folder / LOCK_FILE
        self._fd: int | None = None

    def take(self) -> bool:
        """Take the lease. Returns False when the file system has no locks."""
        # Writable, because NFS locks only such files; for this user alone, because every reader could lock it.
        self._fd = fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        # A process that an agent forks must not hold the lease after this one has ended.
        os.register_at_fork(after_in_child=partial(_close_of, weakref.ref(self)))
        until = time.monotonic() + 1.0  # `meshrl status` holds a shared lock for a moment
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    self.release()
                    raise in_use(self.path.parent) from None
                time.sleep(_POLL_S / 4)
            except OSError:
                return False  # the open file still shows this process to `holds_lease`
            else:
                return True

    def release(self) -> None:
        """Release the lease; safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _close_of(lease: weakref.ref[FolderLease]) -> None:
    current = lease()
    if current is not None:
        current.release()


def is_leased(folder: Path) -> bool:
    """Whether a process holds the lease of this folder."""
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except PermissionError as cause:
        raise MeshrlError(
            f"{folder / LOCK_FILE} can't be opened, so it is unknown whether the run is alive. Use the account "
            "that started it"
        ) from cause
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return False
    finally:
        os.close(fd)
    return False


def holds_lease(pid: int, folder: Path) -> bool:
    """Whether the process of this machine with this id has the lease's file open. Process ids of another container, or
    of a process that has ended, may belong to any process here."""
    return has_open(pid, folder / LOCK_FILE)


def is_running(folder: Path, status: Status) -> bool:
    """Whether the run in `folder` is alive: its process holds the folder's lease."""
    return is_leased(folder) or (status.host == socket.gethostname() and holds_lease(status.pid, folder))


def _holder_of(folder: Path) -> str:
    """The process that holds a folder's lease, for messages."""
    try:
        status = read_status(folder)
    except MeshrlError:
        return "a run that is starting"
    return f"the run of process {status.pid} on {status.host}"


async def wait_for_folder(run: RunSection) -> None:
    """If this start continues the run in a folder, wait until no earlier process of that run, such as that of a
    requeued job, holds the folder's lease, at most _WAIT_S."""
    folder = Path(run.folder) / run.name
    if run.resume == "never" or run.name == "auto" or not is_leased(folder):
        return
    print_message(f"{folder} is in use by {_holder_of(folder)}; waiting up to {_WAIT_S:.0f} s for its end")
    until = time.monotonic() + _WAIT_S
    while is_leased(folder):
        if time.monotonic() > until:
            raise in_use(folder)
        await asyncio.sleep(_POLL_S)


def in_use(folder: Path) -> MeshrlError:
    """The error of a start in a folder whose lease another process holds."""
    return MeshrlError(
        f"{folder} is in use by {_holder_of(folder)}. Wait until that run has ended (`meshrl stop` ends it), or choose "
        "another run.name"
    )
