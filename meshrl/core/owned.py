"""What lies outside a run's folder and must not outlive who made it: shared memory and temporary folders.

Whoever makes one holds a lock (flock) on it, which the kernel lets go of when the last process that has the descriptor
is gone, however it ended. So what nobody holds is nobody's, and the next run sweeps it away: without a guess at a
process id, which may long be another's, or at an age. Names carry the kernel's boot id, for a temporary folder may lie
on a disk of many machines, whose locks don't show here.
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
    """Of something that its maker will hold; with a slash before it, the 31 characters that macOS allows."""
    return f"meshrl_{_KERNEL or 'somehost'}_{secrets.token_hex(6)}"


def hold(fd: int) -> bool:
    """Lock what has just been made, for as long as the descriptor or a copy of it is open in any process. False when a
    sweep has removed it before it was locked: make another. Where nobody sweeps, always True."""
    with contextlib.suppress(OSError):  # a file system without locks, where no sweep gets one either
        fcntl.flock(fd, fcntl.LOCK_EX)
    return _KERNEL is None or os.fstat(fd).st_nlink > 0


class OwnedFolder:
    """A new temporary folder, removed by `close`, with the object, or at the end of Python; else by a later sweep.

    parent: where it is made; None = the system's folder for what is temporary. fd: holds it; a child that it is passed
    to holds it as well.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.path, self.fd = _held_folder(parent or Path(tempfile.gettempdir()))
        self._remove = weakref.finalize(self, _remove, self.path, self.fd)

    def close(self) -> None:
        """Remove it with all that is in it; safe to call twice."""
        self._remove()


def sweep(*folders: Path) -> list[Path]:
    """Remove what processes of this user have left in these folders (none = shared memory, and the system's folder for
    what is temporary) and nobody holds any more; returns it. Waits for nothing."""
    return [path for path in _ours(folders or (_SHARED_MEMORY, Path(tempfile.gettempdir()))) if _swept(path)]


def _ours(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders if _KERNEL else ():
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            yield from [Path(entry) for entry in entries if _NAME.fullmatch(entry.name)]


def _swept(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # removed meanwhile, or another user's
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
    except OSError:  # somebody holds it, or has removed it meanwhile
        return False
    finally:
        os.close(fd)


def _held_folder(parent: Path) -> tuple[Path, int]:
    while True:
        path = parent / new_name()
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # a sweep was faster
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if hold(fd):
                return path, fd
            os.close(fd)


def _remove(path: Path, fd: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)
