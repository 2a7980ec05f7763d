"""The process of a rank, as its executor sees it: how to start one here, end it, and ask it where it stands.

Imported without torch: what stands guard over a rank's process on another machine needs none.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Protocol

from meshrl.cluster import forked_process, worker
from meshrl.cluster.evidence import Process, StackFile, handles, how_it_ended, oom_kills
from meshrl.monitor.processes import is_stopped


class RankProcess(Protocol):
    """A rank's process on this machine or another. No method waits for the process itself, but `end` does."""

    place: str  # for people, as " on 10.0.0.2 (gpu-7)"; empty on the controller's machine

    def has_ended(self) -> bool: ...

    def how_it_ended(self) -> str:
        """One line, for a process whose channel is closed."""
        ...

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, or a debugger) holds it."""
        ...

    def ask_stacks(self) -> bool:
        """Have it write its threads' stacks; False when it can't yet."""
        ...

    def num_stack_bytes(self) -> int:
        """How much of what was asked for last has come."""
        ...

    def stacks(self) -> str: ...

    def kill(self) -> None:
        """SIGKILL, whatever it does; may be called again."""
        ...

    def end(self, grace_s: float) -> None:
        """Wait for its end, at most grace_s; then make one."""
        ...

    def close(self) -> None:
        """Let go of what is held for it."""
        ...


class LocalProcess:
    """A rank below this process: forked by the fork server, or `python -m meshrl.cluster.worker` where none can be."""

    place = ""

    def __init__(self, channel: socket.socket, name: str, environment: Mapping[str, str]):
        """channel: the rank's end; it is handed over. name: for `ps`."""
        self._oom_kills = oom_kills()
        self._stacks = StackFile(tempfile.TemporaryFile())  # noqa: SIM115, closed with the rank
        with channel:
            self._process = _start(name, {**os.environ, **environment}, channel.fileno(), self._stacks.fd)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        return how_it_ended(self._process, self._oom_kills)

    def is_stopped(self) -> bool:
        return is_stopped(self._process.pid)

    def ask_stacks(self) -> bool:
        """The handler is C: it needs neither the interpreter's lock nor an answer."""
        self._stacks.forget()
        if not handles(self._process, signal.SIGUSR1):
            return False
        self._process.send_signal(signal.SIGUSR1)
        return True

    def num_stack_bytes(self) -> int:
        return self._stacks.size()

    def stacks(self) -> str:
        return self._stacks.read()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.wait()

    def end(self, grace_s: float) -> None:
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self._stacks.close()


def _start(name: str, environment: Mapping[str, str], channel: int, stacks: int) -> Process:
    if forked_process.is_supported():
        return forked_process.fork(name, environment, channel, stacks)
    return subprocess.Popen(
        worker.command(channel, stacks, os.getpid(), name),
        pass_fds=[channel, stacks],
        stdin=subprocess.DEVNULL,
        env=environment,
    )


def python_path() -> str:
    """What a rank needs to import all that its controller can."""
    return os.pathsep.join(path for path in sys.path if path)
