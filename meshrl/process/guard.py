"""A child process that leaves nothing behind: its descendants end with it, and it ends with this process.

A guard process runs between this process and the child, in its own session. When its standard input closes, because the
parent has ended for any reason, the guard kills all its descendants. When the child ends, the guard kills the child's
descendants, and ends with the child's exit code or signal. On Linux it adopts the child's orphans, so that it also
kills processes that have started another session.

In a module of meshrl, the guard forks the child (`fork_below_guard`); any other command is started by
`python -m meshrl.process.guard FOLDER COMMAND ...`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

import psutil

OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""The environment variables of one rank of torch.distributed."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


class GuardedProcess:
    """A guard and its child, as an object of the process that started them. Thread-safe."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        output: IO[bytes],
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ):
        """module: its `main` calls `fork_below_guard`. output: file for stdout and stderr. environment: added to this
        process's environment without the variables of a rank, since a server of several processes has ranks of its own.
        pass_fds: descriptors that the guard inherits."""
        self._killing = threading.Lock()
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,  # closes with this process
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            start_new_session=True,
            env={n: v for n, v in os.environ.items() if n not in OF_A_RANK and not n.startswith("TORCHELASTIC_")}
            | dict(environment),
        )

    @property
    def pid(self) -> int:
        """Process id of the guard, the ancestor of the other processes."""
        return self._guard.pid

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """The child's exit code, negative for a signal; waits for it at most timeout_s. None while the child runs."""
        try:
            return self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the guard and all its descendants, and wait until it has ended; safe to call again."""
        with self._killing:
            if self._guard.poll() is None:
                kill_descendants(self.pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):  # ended; macOS raises the second
                    os.killpg(self.pid, signal.SIGKILL)
            self._guard.communicate()  # closes its standard input and waits


def fork_below_guard(folder: str = "") -> None:
    """Fork, and return only in the child; this process becomes its guard. folder: removed when the parent has ended.

    Call it before this process starts a thread.
    """
    guard = os.getpid()
    _prctl(_SET_CHILD_SUBREAPER, 1)  # it adopts orphans, so that `kill_descendants` finds them
    child = os.fork()
    if child:
        _guard(child, folder)
    end_with_parent(guard)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _guard(child: int, folder: str) -> NoReturn:
    ending = threading.Lock()  # the thread that ends this process acquires it, and never releases it
    threading.Thread(target=_end_with_starter, args=(ending, folder), daemon=True).start()
    pid = 0
    while pid != child:  # others are orphans
        pid, status = os.waitpid(-1, 0)
    ending.acquire()
    kill_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file of the guard is useless
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_with_starter(ending: threading.Lock, folder: str) -> None:
    os.read(0, 1)  # the parent never writes: this returns when its end closes
    ending.acquire()
    kill_descendants(os.getpid())
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def kill_descendants(pid: int) -> None:
    """Send SIGKILL to all descendants of a process, in any process group or session, until no new ones appear."""
    killed: set[int] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        while alive := {child.pid for child in psutil.Process(pid).children(recursive=True)} - killed:
            for child in alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            killed |= alive


def end_with_parent(parent: int | None) -> None:
    """Make the kernel kill this process when the parent's thread that started it ends; None cancels this. Linux only.
    parent: its process id; if the parent has already ended, this process ends at once."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL if parent is not None else 0)
    if sys.platform == "linux" and parent is not None and os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def main(folder: str, command: list[str]) -> NoReturn:
    """Guard a command. The command does not inherit the guard's descriptors, such as a lease."""
    fork_below_guard(folder)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
