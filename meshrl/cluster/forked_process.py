"""A rank's process that the fork server forks, as the process which starts ranks sees it; and its fork server.

A process that starts ranks has one fork server (fork_server.py), which it starts with its first rank and keeps for
later ones. What a rank would inherit from this process (environment variables, working directory, CPU affinity, umask,
resource limits), the fork server has inherited at its own start; when that has changed since, a new fork server takes
its place.

Imported without torch.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_RANKS_OWN = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "PYTEST_CURRENT_TEST"),
}  # variables that no library reads when it is imported: each rank gets its own values after the fork
_LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
_TITLE_ROOM = " " * 64  # an argument of the fork server, so that the command line of a rank fits into its own


def is_supported() -> bool:
    """Whether this system can have a fork server: Linux from 5.3 on, where its seccomp profile allows pidfd_open."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class ForkedProcess:
    """A rank's process, a child of the fork server, with the methods of subprocess.Popen. It is thread-safe."""

    def __init__(self, status: socket.socket, server: subprocess.Popen[bytes]):
        """status: the server sends the process id by it, then the exit code as Popen has it, and takes signals."""
        self.returncode: int | None = None
        self._pid, self._server = 0, server
        self._status, self._reading = status, threading.Lock()
        weakref.finalize(self, status.close)

    @property
    def pid(self) -> int:
        """0 until it has been forked."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        with self._reading:
            while self.returncode is None:
                try:
                    message = self._status.recv(32, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                except ConnectionResetError:  # the server has not read our last signal; what it sent can still be read
                    continue
                if not message:  # the fork server has ended, by an error of its imports or with its ranks
                    self.returncode = -signal.SIGKILL if self._pid else self._server.wait()
                elif not self._pid:
                    self._pid = int(message)
                else:
                    self.returncode = int(message)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        ended = select.poll()
        ended.register(self._status, select.POLLRDHUP)
        ended.poll(None if timeout is None else 1000 * timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._status.send(bytes([number]))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Inherited:
    """What a process takes from the one that starts it."""

    environment: Mapping[str, str]
    folder: str
    cores: frozenset[int]
    umask: str
    limits: tuple[tuple[int, int], ...]


class _ForkServer:
    """The fork server, for the process that has started it."""

    def __init__(self, inherited: _Inherited):
        self.inherited = inherited
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = [sys.executable, "-m", "meshrl.cluster.fork_server"]
        with theirs:
            self.process = subprocess.Popen(
                [*module, str(theirs.fileno()), str(os.getpid()), _TITLE_ROOM],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=inherited.environment,
            )


_servers: list[_ForkServer] = []  # the last one takes requests; the others end when the last of their ranks has
_starting = threading.Lock()


def fork(name: str, environment: Mapping[str, str], channel: int, stacks: int) -> ForkedProcess:
    """Have the fork server start a rank; returns at once. environment: the rank's own, complete. channel, stacks:
    descriptors that the rank inherits beside this process's stdout and stderr."""
    inherited = _Inherited(
        {key: value for key, value in environment.items() if key not in _RANKS_OWN},
        os.getcwd(),
        frozenset(os.sched_getaffinity(0)),
        Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0],  # os.umask would change it
        tuple(resource.getrlimit(number) for number in _LIMITS),
    )
    own = {key: value for key, value in environment.items() if key in _RANKS_OWN}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _starting, theirs:
        request, descriptors = json.dumps([name, own]).encode(), [channel, stacks, theirs.fileno(), 1, 2]
        server = _server_with(inherited)
        try:
            socket.send_fds(server.requests, [request], descriptors)
        except (BrokenPipeError, ConnectionResetError):  # it has died since it was last seen
            server.process.wait()
            server = _server_with(inherited)
            socket.send_fds(server.requests, [request], descriptors)
    return ForkedProcess(ours, server.process)


def _server_with(inherited: _Inherited) -> _ForkServer:
    """The fork server that takes requests, or a new one in its place."""
    _servers[:] = [server for server in _servers if server.process.poll() is None]
    if not _servers or _servers[-1].inherited != inherited or _servers[-1].requests.fileno() < 0:
        retire()
        _servers.append(_ForkServer(inherited))
    return _servers[-1]


def retire() -> None:
    """Send the fork server no more requests: it ends when the last of its ranks has."""
    for server in _servers:
        if server.requests.fileno() >= 0:
            server.requests.close()
            threading.Thread(target=server.process.wait, daemon=True).start()  # else a zombie is left


@atexit.register
def _end_all() -> None:
    for server in _servers:
        server.process.kill()
        server.process.wait()
