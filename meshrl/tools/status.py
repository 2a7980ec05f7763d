"""`meshrl status` and `meshrl stop`: show or end a run from another terminal, by its status.json."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from meshrl.core.errors import MeshrlError
from meshrl.core.files import Unreadable, read_text
from meshrl.monitor.jsonl import data_errors, read_object
from meshrl.monitor.notes import NOTES_FILE, important
from meshrl.monitor.status import Status, read_status
from meshrl.process.family import family
from meshrl.run.lease import holds_lease, is_running
from meshrl.run.verdict import read_verdict
from meshrl.tools.runs import read_facts
from meshrl.train.checkpoint_files import states

_STOP_S = 60.0
_NOTES_SHOWN = 8


def describe(folder: Path) -> str:
    """The output of `meshrl status`."""
    status = read_status(folder)
    runs = is_running(folder, status)
    if runs:
        where = "" if status.host == socket.gethostname() else f" on {status.host}"
        state = f"runs as process {status.pid}{where}, since {time.strftime('%F %T', time.localtime(status.started))}"
    else:
        state = _how_it_ended(folder, status)
    counted, best = "step", list[str]()
    try:
        facts = read_facts(folder)
        counted = facts.counted
        if len(facts.held_out) > 2:
            best = [f"highest held-out score: {facts.best[1]:.3f} at step {facts.best[0]}"]
    except MeshrlError as error:  # the state is known all the same
        best = [str(error)]
    lines = [f"{folder}: {state}", f"{counted} {status.step} of {status.num_steps}"]
    if runs and status.phase:
        lines[-1] += f", in phase {status.phase} for {time.time() - status.since:.0f} s"
    lines += [f"{name} {value:.4g}" for name, value in status.values.items()]
    verdict = read_verdict(folder)
    lines += [] if verdict is None else [verdict.text]
    lines += best if verdict is None or verdict.best is None else []
    lines += _notes(folder)
    if not runs and (saved := states(folder / "checkpoints")):
        lines.append(f"newest checkpoint: after step {saved[-1][0]}; run.resume=auto continues from it")
    for process in family(status.pid) if runs and holds_lease(status.pid, folder) else ():
        name = "controller" if process.pid == status.pid else process.name
        lines.append(f"{process.pid:>8}  {name:<12} {process.rss_bytes / 2**20:>8.0f} MiB")
    return "\n".join(lines)


def _notes(folder: Path) -> list[str]:
    """The last important lines of run_notes.txt."""
    path = folder / NOTES_FILE
    try:
        found = important(read_text(path)) if path.is_file() else []
    except Unreadable as cause:
        found = [f"{path}: {cause}"]
    more = [f"... {len(found) - _NOTES_SHOWN} more in {path}"] if len(found) > _NOTES_SHOWN else []
    return [*more, *(f"{line:.400}" for line in found[-_NOTES_SHOWN:])]


def _how_it_ended(folder: Path, status: Status) -> str:
    path = folder / "result.json"
    if not path.is_file() or path.stat().st_mtime < status.started:
        ended = f"process {status.pid} has ended without a result: it was killed, or the machine was switched off"
        if status.host != socket.gethostname():
            ended += f". (If the file system does not share locks, it may run: use `meshrl status` on {status.host})"
        return ended
    result = read_object(path)
    with data_errors(str(path), "the result of a run"):
        error = f": {result['error'].splitlines()[0]}" if result["error"] else ""
        return f"{result['status']} after {result['wall_s']:.0f} s{error}"


def stop(folder: Path) -> str:
    """End a run with a checkpoint, and wait until it has ended. Returns a text that describes the end.

    Raises: MeshrlError when the run does not run, runs elsewhere, or still runs after a minute.
    """
    status = read_status(folder)
    if not is_running(folder, status):
        raise MeshrlError(f"{folder}: the run is not running; {_how_it_ended(folder, status)}")
    if status.host != socket.gethostname():
        raise MeshrlError(f"the run runs on {status.host}, but this is {socket.gethostname()}; run the command there")
    if not holds_lease(status.pid, folder):  # so no other process gets the signal
        raise MeshrlError(
            f"{folder}: the run runs, but process {status.pid} of this machine does not hold its lease: it is in "
            "another container, or it belongs to another user. Run the command there, or send it SIGTERM"
        )
    os.kill(status.pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_S
    while holds_lease(status.pid, folder):  # another start may take the lease as soon as this run has ended
        if time.monotonic() > until:
            raise MeshrlError(
                f"process {status.pid} got SIGTERM {_STOP_S:.0f} s ago and still runs, in phase "
                f"{read_status(folder).phase}. It finishes its step before it ends; see `meshrl status {folder}`"
            )
        time.sleep(0.1)
    return f"{folder}: {_how_it_ended(folder, status)}; step {read_status(folder).step} of {status.num_steps}"
