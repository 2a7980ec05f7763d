"""The lease of a run's folder: only the process that holds it writes there, and `meshrl status` and `meshrl stop` find
out by it whether the run is alive.

The lease is a lock (flock) on a file in the folder. The kernel releases it when its holder ends, for any reason, so
neither process ids nor times are compared. Processes on other machines see it where the file system passes locks on, as
NFS and Lustre do with most mount options (docs/checkpoints.md). On a file system without locks no lease is possible;
`take` then returns False.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
import weakref
from functools import partial
from pathlib import Path

from meshrl.config.run import RunSection
from meshrl.core.errors import MeshrlError
from meshrl.core.terminal import print_message
from meshrl.monitor.status import Status, read_status
from meshrl.process.family import has_open

LOCK_FILE = "run.lock"
_WAIT_S = 60.0  # for a run that is ending, such as a requeued job's
_POLL_S = 0.2


class FolderLease:
    """The lease of one folder, held from `take` to `release`."""

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
