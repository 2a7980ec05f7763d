"""What a run tells other terminals while it goes on: status.json in its folder, `meshrl status` and `meshrl stop`."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from meshrl.core.errors import MeshrlError
from meshrl.core.files import write_text
from meshrl.monitor.jsonl import picking, read_object, to_line
from meshrl.monitor.processes import family, started_at

_FILE = "status.json"
_SHOWN = ("reward/mean", "loss/nll")  # the number that a run is about, by what it does
_STOP_S = 60.0
_NUMBER, _COUNT, _TEXT = (int, float), (int,), (str,)
_TYPES: dict[str, tuple[type, ...]] = {  # of what Status holds, when somebody else may have written the file
    **{"host": _TEXT, "phase": _TEXT, "shown": _TEXT, "pid": _COUNT, "num_steps": _COUNT, "step": _COUNT},
    **{"started": _NUMBER, "since": _NUMBER},
}


@dataclass(kw_only=True, slots=True)
class Status:
    """Where a run stands. step: finished steps. phase: what it is in now; "" between two. since: of the phase, seconds
    since 1970. value: of the metric `shown` at the last finished step. started: of the process, which tells it from a
    later one of the same id."""

    host: str
    pid: int
    started: float
    num_steps: int
    step: int = 0
    phase: str = "start"
    since: float = 0.0
    shown: str = ""
    value: float | None = None


class StatusFile:
    """Keeps a run's status.json up to date: a Sink for its numbers, and told of each phase. Each version of the file is
    whole."""

    def __init__(self, folder: Path, num_steps: int, first_step: int = 0):
        self._path = folder / _FILE
        self.status = Status(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=started_at(os.getpid()) or 0.0,
            num_steps=num_steps,
            step=first_step,
        )
        self.entered("start")

    def entered(self, phase: str) -> None:
        """The run is in this phase from now on."""
        self.status.phase, self.status.since = phase, time.time()
        self._write()

    def go_back_to(self, step: int) -> None:
        """The run goes on from its first `step` steps."""
        self.status.step = step
        self._write()

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        shown = next((name for name in _SHOWN if name in values), None)
        self.status.step = max(self.status.step, step + 1)
        if shown is not None:
            self.status.shown, self.status.value = shown, values[shown]
        self._write()

    def close(self, failed: bool = False) -> None:
        self.entered("ended")

    def _write(self) -> None:
        write_text(self._path, to_line(asdict(self.status)))


def status_as_it_is(folder: Path) -> bytes | None:
    """The status file as it stands, for `put_back`; None where there is none."""
    path = folder / _FILE
    return path.read_bytes() if path.is_file() else None


def put_back(folder: Path, before: bytes | None) -> None:
    """What `status_as_it_is` found is there again: the run did not begin."""
    if before is None:
        (folder / _FILE).unlink()
    else:
        (folder / _FILE).write_bytes(before)


def read_status(folder: Path) -> Status:
    """Raises: MeshrlError for a folder that no run has written to, or whose status.json is damaged."""
    path = folder / _FILE
    if not path.exists():
        raise MeshrlError(f"{folder} is no run's folder: it has no {_FILE}. Give a folder such as runs/NAME")
    told = read_object(path)
    with picking(str(path), "the status of a run"):
        status = Status(**told | {"value": None if told["value"] is None else float(told["value"])})
        for name, types in _TYPES.items():
            if type(getattr(status, name)) not in types:
                raise TypeError(f"{name} is {getattr(status, name)!r:.80}")
        if not 1 < status.pid < 1 << 31:  # `stop` sends it a signal: 0, 1 and -1 would be everybody
            raise ValueError(f"pid is {status.pid}")
    return status


def is_running(status: Status) -> bool:
    """Whether the run's controller still runs. Raises: MeshrlError on another machine, which can't know."""
    if status.host != socket.gethostname():
        raise MeshrlError(f"the run was started on {status.host}, and this is {socket.gethostname()}; ask there")
    started = started_at(status.pid)
    return started is not None and abs(started - status.started) < 1.0


def describe(folder: Path) -> str:
    """The answer of `meshrl status`, for people."""
    status = read_status(folder)
    here = status.host == socket.gethostname()
    runs = here and is_running(status)
    if runs:
        state = f"runs as process {status.pid}, since {time.strftime('%F %T', time.localtime(status.started))}"
    elif not here:
        state = f"was started on {status.host} as process {status.pid}; whether it runs is known there"
    else:
        state = _how_it_ended(folder, status)
    lines = [f"{folder}: {state}", f"step {status.step} of {status.num_steps}"]
    if runs and status.phase:
        lines[-1] += f", in phase {status.phase} for {time.time() - status.since:.0f} s"
    if status.value is not None:
        lines.append(f"{status.shown} {status.value:.4g}")
    for process in family(status.pid) if runs else ():
        name = "controller" if process.pid == status.pid else process.name
        lines.append(f"{process.pid:>8}  {name:<12} {process.rss_bytes / 2**20:>8.0f} MB")
    return "\n".join(lines)


def _how_it_ended(folder: Path, status: Status) -> str:
    result = folder / "result.json"
    if not result.is_file() or result.stat().st_mtime < status.started:
        return f"process {status.pid} is gone and left no result: it was killed, or the machine went down"
    told = read_object(result)
    with picking(str(result), "the result of a run"):
        error = f": {told['error'].splitlines()[0]}" if told["error"] else ""
        return f"{told['status']} after {told['wall_s']:.0f} s{error}"


def stop(folder: Path) -> str:
    """Ask a run to end with a checkpoint, and wait for it. What happened, for people.

    Raises: MeshrlError when nothing runs, or it has not ended after a minute.
    """
    status = read_status(folder)
    if not is_running(status):
        raise MeshrlError(f"{folder}: nothing runs there; {_how_it_ended(folder, status)}")
    os.kill(status.pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_S
    while is_running(status):
        if time.monotonic() > until:
            raise MeshrlError(
                f"process {status.pid} was asked to end {_STOP_S:.0f} s ago and still runs, in phase "
                f"{read_status(folder).phase}. A step is finished before it ends; `meshrl status {folder}` tells when"
            )
        time.sleep(0.1)
    return f"{folder}: {_how_it_ended(folder, status)}; step {read_status(folder).step} of {status.num_steps}"
