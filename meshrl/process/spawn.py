"""Child processes that run a Python module of meshrl: forked from a fork server, or new interpreters without one.

A process that spawns has one fork server (fork_server.py). It starts with the first child, or before by `prepare`, and
serves later ones. The fork server inherits environment variables, CPU affinity, umask and resource limits when it
starts; when one of them has changed in this process, a new fork server replaces it, except for variables that no import
reads. Each child gets the present working folder.

The module's `main` calls `inherited_channel()` first. This module does not import torch.

All processes have folders of compiled code that no other user can write. By default PyTorch loads such code from a
folder of the system's temporary folder whose name is known, and which another user can create first.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.core.files import is_private
from meshrl.process.diagnosis import Snapshot, how_it_ended, oom_kills, snapshot
from meshrl.process.guard import OF_A_RANK, end_with_parent
from meshrl.process.leases import LeasedFolder, sweep

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "QUACK_CACHE_DIR": "quack"}
"""Environment variable -> name of its folder. Triton, vLLM and FlashInfer have theirs in the user's home."""
STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
"""End a run with a checkpoint: SIGUSR2 is sent by submitit, and SIGHUP by a lost terminal."""
_OWN_VARIABLES = {
    *OF_A_RANK,
    *("GLOO_SOCKET_IFNAME", "PYTEST_CURRENT_TEST", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"),
}  # no library reads them when it is imported: each child gets its own values after the fork
# The fork server has these, too, but children may have others. PyTorch and scikit-learn set three of them when they are
# imported; modules that a child imports are searched in its own PYTHONPATH.
_SET_AFTER_START = {*CACHES, "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTHONPATH"}
_LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
_TITLE_ROOM = " " * 64  # an argument of the fork server that reserves room for the command line of a child


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a child: the `main` of a module. preload: modules that the fork server imports before."""

    module: str
    preload: tuple[str, ...] = ()


class SpawnedProcess:
    """A child process with a channel to this one. Only `ending` and `end` wait for the process."""

    place = ""  # for messages: it runs on this machine

    def __init__(self, program: Program, name: str, environment: Mapping[str, str], channel: socket.socket):
        """name: for `ps`. environment: added to this process's environment. channel: the child's end, closed here."""
        self._oom_kills = oom_kills()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`
        descriptors = channel.fileno(), self._stacks.fileno()
        environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | ForkedProcess
        with channel:
            if can_fork():
                self._process = fork(program, name, environment, *descriptors)
            else:
                words = command(program.module, *descriptors, os.getpid(), name)
                self._process = subprocess.Popen(words, pass_fds=descriptors, stdin=subprocess.DEVNULL, env=environment)

    def ending(self, timeout_s: float | None = 0.0) -> str | None:
        """How it ended, in one line; waits for that at most timeout_s (None = no limit). None while it runs."""
        try:
            return how_it_ended(self._process.wait(timeout_s), self._oom_kills)
        except subprocess.TimeoutExpired:
            return None

    def snapshot(self, recorder: str = "") -> Snapshot:
        """Its stacks; blocks for a few seconds at most. recorder: the socket of its flight recorder."""
        return snapshot(self._process.pid, self._process.send_signal, self._stacks, recorder)

    def kill(self) -> None:
        """Send SIGKILL; safe to call again."""
        self._process.kill()

    def end(self, grace_s: float) -> None:
        """Wait at most grace_s until it ends; then kill it. Removes the temporary resources that it has left."""
        if self.ending(grace_s) is None:
            self._process.kill()
            self._process.wait()
        sweep()
        self._stacks.close()


def inherited_channel() -> socket.socket:
    """In a spawned process: its channel. From now on the process ends with its parent, ignores interrupts, and writes
    its stacks on SIGUSR1."""
    channel, stacks, parent = (int(word) for word in sys.argv[1:4])
    end_with_parent(parent)
    ignore_interrupts()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    return socket.socket(fileno=channel)


def ignore_interrupts() -> None:
    """Ctrl-C and STOPS are sent to a complete process group or job; only the controller of the run handles them."""
    for number in (signal.SIGINT, *STOPS):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a program that this one starts would inherit


def command(module: str, channel: int, stacks: int, parent: int, name: str) -> list[str]:
    """The command line of a new interpreter. channel, stacks: descriptors of the channel and of the file for stacks.
    parent: the id of the process that it must not outlive. name: for `ps`."""
    return [sys.executable, "-m", module, str(channel), str(stacks), str(parent), name]


def can_fork() -> bool:
    """Whether this system can have a fork server: Linux 5.3 or later, if its seccomp profile allows pidfd_open."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class ForkedProcess:
    """A child of the fork server, with the methods of subprocess.Popen. Thread-safe."""

    def __init__(self, status: socket.socket, server: subprocess.Popen[bytes]):
        """status: the server sends the process id on it, then the exit code (as Popen's), and receives signals."""
        self.returncode: int | None = None
        self._pid, self._server = 0, server
        self._status, self._reading = status, threading.Lock()
        weakref.finalize(self, status.close)

    @property
    def pid(self) -> int:
        """Its process id; 0 until it has been forked."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        with self._reading:
            while self.returncode is None:
                try:
                    message = self._status.recv(32, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                except ConnectionResetError:  # the server did not read our last signal; its messages are still readable
                    continue
                if not message:  # the fork server has ended, by an error in its imports or with its children
                    self.returncode = -signal.SIGKILL if self._pid else self._server.wait()
                elif not self._pid:
                    self._pid = int(message)
                else:
                    self.returncode = int(message)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        poller = select.poll()
        poller.register(self._status, select.POLLRDHUP)
        poller.poll(None if timeout is None else 1000 * timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            self._status.send(bytes([number]))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _ForkServer:
    """inherited: the properties that its children inherit from it: a change needs another fork server. environment: its
    complete environment."""

    process: subprocess.Popen[bytes]
    requests: socket.socket
    inherited: tuple[Any, ...]
    environment: Mapping[str, str]


_server: _ForkServer | None = None  # former ones end after their last child
_starting = threading.Lock()


def prepare(program: Program, environment: Mapping[str, str]) -> None:
    """Start the fork server of this program, so that it imports while this process does something else. environment:
    that its children will have in addition to this process's. In other threads than the main one, with which the kernel
    would end a fork server that still imports, it does nothing."""
    if can_fork() and threading.current_thread() is threading.main_thread():
        with _starting:
            _server_with(program.preload, {**os.environ, **environment})


def fork(program: Program, name: str, environment: Mapping[str, str], channel: int, stacks: int) -> ForkedProcess:
    """Request a process from the fork server; returns at once. environment: the child's complete environment. channel,
    stacks: descriptors that it inherits in addition to this process's stdout and stderr."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _starting, theirs:
        descriptors = [channel, stacks, theirs.fileno(), 1, 2]
        for last in (False, True):
            server = _server_with(program.preload, environment)
            own = {key: value for key, value in environment.items() if server.environment.get(key) != value}
            try:
                request = json.dumps([program.module, name, own, os.getcwd()])
                socket.send_fds(server.requests, [request.encode()], descriptors)
                break
            except (BrokenPipeError, ConnectionResetError):  # it has died since `_server_with` checked it
                if last:
                    raise
                server.process.wait()
    return ForkedProcess(ours, server.process)


def _server_with(preload: tuple[str, ...], environment: Mapping[str, str]) -> _ForkServer:
    """The fork server for children with these properties; a new one replaces a server with others."""
    global _server
    common = {key: value for key, value in environment.items() if key not in _OWN_VARIABLES}
    inherited = (
        preload,
        {key: value for key, value in common.items() if key not in _SET_AFTER_START},
        os.sched_getaffinity(0),
        Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0],  # os.umask can only read by writing
        [resource.getrlimit(number) for number in _LIMITS],
    )
    if _server is None or _server.process.poll() is not None or _server.inherited != inherited:
        retire()
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = [sys.executable, "-m", "meshrl.process.fork_server"]
        with theirs:
            process = subprocess.Popen(
                [*module, str(theirs.fileno()), str(os.getpid()), _TITLE_ROOM, *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=common,
            )
        _server = _ForkServer(process, requests, inherited, common)
    return _server


def retire() -> None:
    """Send the fork server no more requests: it ends after its last child."""
    global _server
    if _server is not None:
        _server.requests.close()
        threading.Thread(target=_server.process.wait, daemon=True).start()  # else a zombie is left
        _server = None


@atexit.register
def _end_server() -> None:
    if _server is not None:
        _server.process.kill()
        _server.process.wait()


_temporary: LeasedFolder | None = None  # in place of a home that can't be written


def use_private_caches() -> None:
    """Set the variables for this process and those that it starts. A folder that the user has set stays; PyTorch sets
    its default when it is imported."""
    for name, folder in CACHES.items():
        value = os.environ.get(name)
        if not value or value.startswith(str(Path(tempfile.gettempdir(), "torchinductor_"))):
            os.environ[name] = str(_home() / folder)


def _home() -> Path:
    """The folder meshrl in the user's cache, or a temporary folder of this process."""
    global _temporary
    path = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "meshrl"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_private(path) and os.access(path, os.W_OK):
        return path
    _temporary = _temporary or LeasedFolder()
    return _temporary.path
