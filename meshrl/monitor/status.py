"""status.json in a run's folder: the run's current step and phase, for `meshrl status` in another terminal."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from meshrl.core.files import write_text
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.jsonl import data_errors, read_object, to_line

STATUS_FILE = "status.json"
STOP_FILE = "stopped"  # `meshrl stop` writes it; the next start by a user removes it
_SHOWN = ("reward/mean", "loss/nll", "run/train_idle", "run/rollout_idle", "rollout/staleness_versions/p95")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank, or one that it has started. name: of process/diagnosis.py. role: what the rank does, or
    the rank that has started it."""

    host: str
    pid: int
    name: str
    role: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The state of a run. step: finished steps. phase: the current one; "" between two. since: start of the phase,
    seconds since 1970. values: main metrics of the last finished step. started: when this part of the run was started,
    seconds since 1970. ranks: the processes of all machines, as each rank has reported them after its start.
    health: the rules of health.json that hold."""

    host: str
    pid: int
    started: float
    num_steps: int
    step: int = 0
    phase: str = "start"
    since: float = 0.0
    values: dict[str, float | None] = field(default_factory=dict)
    ranks: Sequence[RankProcess] = ()
    health: Sequence[str] = ()


_TYPES: dict[str, tuple[type, ...]] = {  # checked because another program may have written the file
    **dict.fromkeys(("host", "phase", "name", "role"), (str,)),
    **dict.fromkeys(("pid", "num_steps", "step"), (int,)),
    **dict.fromkeys(("started", "since"), (int, float)),
}


def read_status(folder: Path) -> Status:
    """Read a run's status.json."""
    path = folder / STATUS_FILE
    record = read_object(path)
    with data_errors(str(path), "the status of a run"):
        values = {str(name): float(value) for name, value in record["values"].items() if value is not None}
        health = [str(name) for name in record.get("health", ())]
        ranks = [RankProcess(**r) for r in record.get("ranks", ())]
        status = Status(**record | {"values": values, "ranks": ranks, "health": health})
        holders: list[Status | RankProcess] = [status, *status.ranks]
        for holder in holders:
            for name, types in _TYPES.items():
                if type(value := getattr(holder, name, types[0]())) not in types:
                    raise TypeError(f"{name} is {value!r:.80}")
        if not 1 < status.pid < 1 << 31:  # `stop` sends it a signal; 0, 1 and -1 would reach other processes
            raise ValueError(f"pid is {status.pid}")
        if not all(0 < process.pid < 1 << 31 for process in status.ranks):
            raise ValueError(f"pids of ranks are {[process.pid for process in status.ranks]}")
    return status


class StatusFile:
    """A sink that keeps a run's status.json up to date; it is also called at each change of the phase. A thread writes
    the file, so that a slow file system does not delay the run. writes: counts failed writes, which end no run."""

    def __init__(self, folder: Path, num_steps: int, first_step: int = 0, writes: FailedWrites | None = None):
        self._path, self._writes = folder / STATUS_FILE, writes or FailedWrites()
        self._before = self._path.read_bytes() if self._path.is_file() else None
        self._changed, self._lock, self._is_open = threading.Event(), threading.Lock(), True
        self._ranks: Callable[[], Sequence[RankProcess]] = tuple
        self.status = Status(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=time.time(),
            num_steps=num_steps,
            step=first_step,
            since=time.time(),
        )
        self._write()
        threading.Thread(target=self._write_changes, daemon=True).start()

    def show_processes(self, ranks: Callable[[], Sequence[RankProcess]]) -> None:
        """The ranks have started: from now on the file has their processes."""
        self._ranks = ranks

    def entered(self, phase: str) -> None:
        """Record that the run has entered this phase."""
        self.status = replace(self.status, phase=phase, since=time.time())
        self._changed.set()

    def show_health(self, rules: Sequence[str]) -> None:
        """Record which rules hold."""
        self.status = replace(self.status, health=rules)
        self._changed.set()

    def go_back_to(self, step: int) -> None:
        """Record that the run continues after its first `step` steps."""
        self.status = replace(self.status, step=step)
        self._changed.set()

    def restore_file(self) -> None:
        """Restore the file's former contents, because the run was refused. Call it after `close`."""
        with self._writes.attempt(STATUS_FILE):
            if self._before is None:
                self._path.unlink()
            else:
                self._path.write_bytes(self._before)

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        shown = self.status.values | {name: values[name] for name in _SHOWN if name in values}
        self.status = replace(self.status, step=max(self.status.step, step), values=shown)
        self._changed.set()

    def close(self, failed: bool = False) -> None:
        self.entered("ended")
        with self._lock:
            self._is_open = False
            self._write()

    def _write(self) -> None:
        with self._writes.attempt(STATUS_FILE):
            write_text(self._path, to_line(asdict(replace(self.status, ranks=self._ranks()))))

    def _write_changes(self) -> None:
        while self._changed.wait():
            self._changed.clear()
            with self._lock:
                if not self._is_open:
                    return
                self._write()
            time.sleep(0.2)  # in fully_async, phases change a thousand times a second
