"""Leases on what lies outside a run's folder and must not outlive the processes that use it: shared memory and
temporary folders.

The process that creates such a resource takes a lease: a lock (flock) on its descriptor, which the kernel releases when
the last process that has the descriptor ends, however it ends. A resource without a lease belongs to no process, and
the next run removes it. So no process id has to be checked, which a later process may have got, and no age has to be
guessed. Names contain the kernel's boot id: a temporary folder may lie on a disk that several machines share, and locks
of other machines are not visible here.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KERNEL = _BOOT_ID.read_text()[:8] if _BOOT_ID.exists() else None
_NAME = re.compile(rf"meshrl_{_KERNEL}_\w+")
_SHARED_MEMORY = Path("/dev/shm")


def new_name() -> str:
    """A name for a resource that gets a lease; with a slash before it, it has the 31 characters that macOS allows."""
    return f"meshrl_{_KERNEL or 'somehost'}_{secrets.token_hex(6)}"


def take_lease(fd: int) -> bool:
    """Lock a new resource for as long as the descriptor or a copy of it is open in any process.

    Returns False when a sweep has removed the resource before it was locked: create another. Always True where nothing
    is swept.
    """
    with contextlib.suppress(OSError):  # a file system without locks, where a sweep gets none either
        fcntl.flock(fd, fcntl.LOCK_EX)
    return _KERNEL is None or os.fstat(fd).st_nlink > 0


class LeasedFolder:
    """A new temporary folder, removed by `close`, with the object, or at the end of Python; else by a later sweep.

    parent: where it is created; None = the system's folder for temporary files. fd: carries the lease; a child process
    that inherits this descriptor shares the lease.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.path, self.fd = _new_folder(parent or Path(tempfile.gettempdir()))
        self._remove = weakref.finalize(self, _remove, self.path, self.fd)

    def close(self) -> None:
        """Remove the folder and its contents; safe to call twice."""
        self._remove()


def sweep(*folders: Path) -> list[Path]:
    """Remove what processes of this user have left in these folders without a lease, and return it. It never waits.

    folders: none = shared memory and the system's folder for temporary files.
    """
    return [path for path in _named(folders or (_SHARED_MEMORY, Path(tempfile.gettempdir()))) if _swept(path)]


def _named(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders if _KERNEL else ():
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            yield from [Path(entry) for entry in entries if _NAME.fullmatch(entry.name)]


def _swept(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it was removed meanwhile, or belongs to another user
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
        return not path.exists()
    except OSError:  # it has a lease, or was removed meanwhile
        return False
    finally:
        os.close(fd)


def _new_folder(parent: Path) -> tuple[Path, int]:
    while True:
        path = parent / new_name()
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # a sweep has removed it
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if take_lease(fd):
                return path, fd
            os.close(fd)


def _remove(path: Path, fd: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)
