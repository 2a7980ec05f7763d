"""A child process that leaves nothing behind: all that descends from it ends with it, and it ends with this process.

In between runs a guard, in a session of its own. It waits for two things. When the other end of its standard input
closes, because the parent has ended in whatever way, it kills all that descends from it. When its child ends, it kills
what the child has left, and ends as the child did. On Linux it adopts the child's orphans, so that a process in a
session of its own is killed, too.

A module of ours has the guard fork its process (`fork_below_guard`); any other command is started by
`python -m meshrl.process.guard FOLDER COMMAND ...`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

from meshrl.process.kill_tree import adopt_orphans, end_with_parent, kill_descendants


class GuardedProcess:
    """A guard with its child, as the process sees it that has started them. Thread-safe."""

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
        process's own. pass_fds: descriptors that it inherits."""
        self._killing = threading.Lock()
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,  # closes with this process
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            start_new_session=True,
            env={**os.environ, **environment},
        )

    @property
    def pid(self) -> int:
        """Of the guard, from which all other processes descend."""
        return self._guard.pid

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """The child's, negative for a signal, waiting so long for it; None while it runs."""
        try:
            return self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the guard and all that descends from it, and wait for its end; safe to call again."""
        with self._killing:
            if self._guard.poll() is None:
                kill_descendants(self.pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS raises the second
                    os.killpg(self.pid, signal.SIGKILL)
            self._guard.communicate()  # closes its standard input and waits


def fork_below_guard(folder: str = "") -> None:
    """Fork, and return in the child alone; this process becomes its guard. folder: removed when the parent has ended.

    To be called before this process starts a thread.
    """
    guard = os.getpid()
    adopt_orphans()
    child = os.fork()
    if child:
        _guard(child, folder)
    end_with_parent(guard)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _guard(child: int, folder: str) -> NoReturn:
    ending = threading.Lock()  # acquired by the thread that ends this process, and never released
    threading.Thread(target=_end_with_starter, args=(ending, folder), daemon=True).start()
    pid = 0
    while pid != child:  # others are orphans
        pid, status = os.waitpid(-1, 0)
    ending.acquire()
    kill_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core of a guard is of no use
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


def main(folder: str, command: list[str]) -> NoReturn:
    """Guard a command. The descriptors that the guard has inherited, such as a lease, are not passed on."""
    fork_below_guard(folder)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
