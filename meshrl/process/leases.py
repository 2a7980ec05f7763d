"""Leases on resources outside a run's folder that must not outlive their processes: shared memory and temporary
folders.

The process that creates such a resource takes a lease: a lock (flock) on its descriptor. The kernel releases the lock
when the last process that has the descriptor ends, for any reason. A resource without a lease belongs to no process:
a sweep removes it, when a child process has ended and at the start of each run. So no process ids (a later process may
have the same one) and no ages are compared. Names contain the kernel's boot id: a temporary folder may be on a disk
that several machines share, and the locks of other machines are not visible here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KERNEL = _BOOT_ID.read_text()[:8] if _BOOT_ID.exists() else None
_NAME = re.compile(rf"meshrl_{_KERNEL}_\w+")
_SHARED_MEMORY, _SHORT = Path("/dev/shm"), Path("/tmp")


def new_name() -> str:
    """A name for a resource with a lease. With a leading slash it has 31 characters, the maximum of macOS."""
    return f"meshrl_{_KERNEL or 'somehost'}_{secrets.token_hex(6)}"


def take_lease(fd: int) -> bool:
    """Lock a new resource as long as the descriptor or a copy of it is open in any process.

    Returns False when a sweep removed the resource before it was locked: create another. Always True on systems where
    `sweep` does nothing.
    """
    with contextlib.suppress(OSError):  # a file system without locks; a sweep can't lock there either
        fcntl.flock(fd, fcntl.LOCK_EX)
    return _KERNEL is None or os.fstat(fd).st_nlink > 0


class LeasedFolder:
    """A new temporary folder. It is removed by `close`, with the object, or when Python exits; else by a later sweep.

    fd: has the lease; a child process that inherits this descriptor shares the lease. most_bytes: of its path; where it
    would be longer, the folder is in /tmp, because a Unix socket's path has 107 bytes at most.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        while True:
            self.path = Path(tempfile.gettempdir()) / new_name()
            if most_bytes is not None and len(os.fsencode(self.path)) > most_bytes and os.access(_SHORT, os.W_OK):
                self.path = _SHORT / self.path.name
            self.path.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # a sweep has removed it
                self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                if take_lease(self.fd):
                    break
                os.close(self.fd)
        self._remove = weakref.finalize(self, _remove, self.path, self.fd)

    def close(self) -> None:
        """Remove the folder and its contents; safe to call twice."""
        self._remove()


def sweep() -> None:
    """Remove this user's resources without a lease from shared memory, from the system's folder for temporary files and
    from /tmp. It never waits."""
    for folder in {_SHARED_MEMORY, _SHORT, Path(tempfile.gettempdir())} if _KERNEL else ():
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if not _NAME.fullmatch(path.name):
                    continue
                # Errors: it has a lease, it belongs to another user, or another process has removed it meanwhile.
                with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                    stack.callback(os.close, fd)
                    if os.fstat(fd).st_uid == os.geteuid():
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def _remove(path: Path, fd: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)
