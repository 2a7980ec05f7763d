"""`meshrl status` and `meshrl stop`: show or end a run from another terminal, by its status.json."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from meshrl.core.errors import MeshrlError
from meshrl.core.files import write_text
from meshrl.core.terminal import command
from meshrl.monitor.notes import NOTES_FILE, important
from meshrl.monitor.status import STOP_FILE, RankProcess, Status, read_status
from meshrl.process.diagnosis import FamilyMember, family
from meshrl.run.folder import read_best
from meshrl.run.lease import holds_lease, is_running
from meshrl.run.verdict import verdict_of
from meshrl.tools.report.folder import text_of_file
from meshrl.tools.runs import read_facts
from meshrl.tools.state import State, read_part, require_run
from meshrl.train.checkpoint_files import states

_STOP_S = 60.0
_NOTES_SHOWN = 8


def describe(folder: Path) -> str:
    """The output of `meshrl status`."""
    run = read_facts(folder)
    status, problems = run.state.status, run.state.problems
    lines = [f"{folder}: {_state_text(folder, run.state)}", run.progress]
    if status is not None:
        if run.state.word == "running" and status.phase:
            lines[-1] += f", in phase {status.phase} for {time.time() - status.since:.0f} s"
        lines += [f"{name} {value:.4g}" for name, value in status.values.items()]
    best = read_part(problems, read_best, folder)
    verdict = verdict_of(run.evals, best)
    lines += verdict.lines if verdict is not None else []
    if best is None and len(run.held_out) > 2:
        lines.append(f"highest held-out score: {run.best[1]:.3f} at step {run.best[0]}")
    notes = important(read_part(problems, text_of_file, folder / NOTES_FILE) or "")
    lines += [f"damaged: {problem}" for problem in problems]
    if len(notes) > _NOTES_SHOWN:
        lines.append(f"... {len(notes) - _NOTES_SHOWN} more in {folder / NOTES_FILE}")
    lines += [f"{line:.400}" for line in notes[-_NOTES_SHOWN:]]
    if run.state.word != "running":
        saved = states(folder / "checkpoints")
        lines += [f"newest checkpoint: after step {saved[-1][0]}; run.resume=auto continues from it"] if saved else []
    elif status is not None and (status.host != socket.gethostname() or holds_lease(status.pid, folder)):
        lines += _processes(status)
    return "\n".join(lines)


def _processes(status: Status) -> Iterator[str]:
    """A line for each process of a run: those of this machine with their memory, then those of each other machine."""
    here = socket.gethostname()
    of_run = [RankProcess(status.host, status.pid, "controller", ""), *status.ranks]
    local = {process.pid: process for process in of_run if process.host == here}
    members = dict[int, FamilyMember]()
    for process in local.values():
        found = list(family(process.pid))
        if found and process.name in ("controller", found[0].name):  # else another program has got its pid
            members |= {member.pid: member for member in found}
    for pid, member in members.items():
        known = local.get(pid, RankProcess(here, pid, member.name, ""))
        yield f"{pid:>8}  {known.name:<12} {member.rss_bytes / 2**20:>8.0f} MiB  {known.role}".rstrip()
    for process in of_run:
        if process.host != here:
            place = f"on {process.host}, not checked from here"
            yield f"{process.pid:>8}  {process.name:<12} {place}  {process.role}".rstrip()
        elif process.pid not in members and process.name != "other":
            yield f"{process.pid:>8}  {process.name:<12} has ended"


def _state_text(folder: Path, state: State) -> str:
    status, word, result = state.status, state.word, state.result
    process = "its process" if status is None else f"process {status.pid} on {status.host}"
    if word == "running":
        since = "" if status is None else f", since {time.strftime('%F %T', time.localtime(status.started))}"
        return f"runs as {process}{since}"
    if word == "killed":
        text = f"{process} has ended without a result: it was killed, or the machine was switched off"
        if status is not None and status.host != socket.gethostname():
            there = f"use `{command('status', folder)}` on {status.host}"
            text += f". (If the file system does not share locks, it may run: {there})"
        return text
    after = f" after {result['wall_s']:.0f} s" if result.get("wall_s") is not None else ""
    return f"{state.text}{after}{': ' + result['error'].splitlines()[0] if result.get('error') else ''}"


def stop(folder: Path) -> str:
    """End a run with a checkpoint, and wait until it has ended. Returns a text that describes the end."""
    require_run(folder)
    status = read_status(folder)
    if not is_running(folder, status):
        raise MeshrlError(f"the run is not running; {describe(folder).splitlines()[0]}")
    if status.host != socket.gethostname():
        raise MeshrlError(f"the run runs on {status.host}, but this is {socket.gethostname()}; run the command there")
    if not holds_lease(status.pid, folder):  # so no other process gets the signal
        raise MeshrlError(
            f"{folder}: the run runs, but process {status.pid} of this machine does not hold its lease: it is in "
            "another container, or it belongs to another user. Run the command there, or send it SIGTERM"
        )
    write_text(folder / STOP_FILE, "")
    os.kill(status.pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_S
    while holds_lease(status.pid, folder):  # another start may take the lease as soon as this run has ended
        if time.monotonic() > until:
            raise MeshrlError(
                f"process {status.pid} got SIGTERM {_STOP_S:.0f} s ago and still runs, in phase "
                f"{read_status(folder).phase}. It finishes its step before it ends; see `{command('status', folder)}`"
            )
        time.sleep(0.1)
    return "; ".join(describe(folder).splitlines()[:2])
