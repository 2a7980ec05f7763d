"""The fork server: a process that has imported torch and meshrl and forks ranks, which then start in milliseconds.

The process that starts ranks asks for each of them by a socket (forked_process.py). A rank is a child of the fork
server: for each of them a socket of its own takes its process id and its exit code to the process that has asked, and
brings signals, which can't reach a later process of the same id. Ranks end with the fork server, and it ends with the
process that has started it, and after its last rank when no more requests can come. Needs Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from meshrl.cluster.worker import command, end_with, run_rank

_PRELOADED = ("meshrl.cluster.actors", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_REQUEST_BYTES = 1 << 16
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/console")


@dataclass(slots=True)
class _Forked:
    """A rank that has not ended. descriptor: of its process (pidfd)."""

    pid: int
    descriptor: int
    status: socket.socket


class _Requests:
    """Serves requests to the end: of the process that sends them, or of all ranks once no more requests can come."""

    def __init__(self, requests: socket.socket, may_fork: bool):
        """may_fork: False executes a new interpreter in each rank's process."""
        self.requests, self.may_fork, self.pid = requests, may_fork, os.getpid()
        self.starter = os.pidfd_open(os.getppid())
        self.ranks: list[_Forked] = []
        self.selector = selectors.PollSelector()  # epoll would share its list with the ranks
        self.selector.register(requests, selectors.EVENT_READ)
        self.selector.register(self.starter, selectors.EVENT_READ)

    def serve(self) -> None:
        while self.ranks or self.requests.fileno() >= 0:
            ready = self.selector.select()[0][0]  # one at a time: what it changes may concern the next
            if ready.fileobj is self.requests:
                self.take_request()
            elif ready.fileobj == self.starter:
                return
            elif isinstance(ready.fileobj, int):
                self.reap(ready.data)
            else:
                self.send_signal(ready.data)

    def take_request(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self.requests, _REQUEST_BYTES, 5)
        if not message:
            self.selector.unregister(self.requests)
            self.requests.close()
            return
        name, environment = json.loads(message)
        pid = os.fork()
        if pid == 0:
            self.become_rank(name, environment, descriptors)
        channel, stacks, status, out, err = descriptors
        for descriptor in (channel, stacks, out, err):
            os.close(descriptor)
        rank = _Forked(pid, os.pidfd_open(pid), socket.socket(fileno=status))
        self.report(rank, pid)
        self.ranks.append(rank)
        self.selector.register(rank.descriptor, selectors.EVENT_READ, rank)
        self.selector.register(rank.status, selectors.EVENT_READ, rank)

    def send_signal(self, rank: _Forked) -> None:
        """It is not reaped yet, so its id is still its own."""
        try:
            number = rank.status.recv(1)
        except ConnectionResetError:
            number = b""
        if number:
            os.kill(rank.pid, number[0])
        else:  # the other end is closed: no signal and no question can come
            self.selector.unregister(rank.status)

    def report(self, rank: _Forked, number: int) -> None:
        with contextlib.suppress(OSError):  # nothing waits for it any more
            rank.status.send(str(number).encode())

    def reap(self, rank: _Forked) -> None:
        _, status = os.waitpid(rank.pid, 0)
        self.report(rank, os.waitstatus_to_exitcode(status))
        self.forget(rank)
        self.ranks.remove(rank)

    def forget(self, rank: _Forked) -> None:
        for source in (rank.descriptor, rank.status):
            with contextlib.suppress(KeyError):
                self.selector.unregister(source)
        os.close(rank.descriptor)
        rank.status.close()

    def become_rank(self, name: str, environment: dict[str, str], descriptors: Sequence[int]) -> NoReturn:
        """In the child: drop what is the server's and become what `python -m meshrl.cluster.worker` would be."""
        import numpy as np

        try:
            end_with(self.pid)
            for rank in self.ranks:
                self.forget(rank)
            self.selector.close()
            self.requests.close()
            os.close(self.starter)
            channel, stacks, status, out, err = descriptors
            os.dup2(out, 1)
            os.dup2(err, 2)
            for descriptor in (status, out, err):
                os.close(descriptor)
            os.environ.update(environment)
            words = command(channel, stacks, self.pid, name)
            if not self.may_fork:
                os.execv(words[0], words)
            _set_title(f"{' '.join(words[:3])} {name}")
            np.random.seed()  # Python's own generator does this by itself
            run_rank(socket.socket(fileno=channel), stacks)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _set_title(title: str) -> None:
    """Overwrite this process's command line, which `ps` and monitor/processes.py read."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end of proc(5)
    text = title.encode()[: end - start - 2] + b"\0"
    if start:
        ctypes.memset(start, ord(" "), end - start)  # the kernel reads up to the NUL where the last byte is none
        ctypes.memmove(start, text, len(text))


def _can_fork() -> bool:
    """Whether a forked child works: with threads it may hang, with an initialised device it can't use that device."""
    child = os.fork()  # OpenBLAS ends its threads at a fork, and starts them again when they are needed
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1 and not _open_devices()


def _open_devices() -> list[str]:
    """What this process has opened under /dev but for terminals and such: drivers of accelerators."""
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor by which this folder is listed
            if stat.S_ISCHR(link.stat().st_mode):
                opened.append(str(link.readlink()))
    return [path for path in opened if not path.startswith(_HARMLESS_DEVICES)]


def main() -> None:
    """Arguments: the descriptor of the socket by which the requests come, and the id of the process that sends them."""
    descriptor, starter = int(sys.argv[1]), int(sys.argv[2])
    end_with(starter)
    for number in (signal.SIGINT, signal.SIGTERM):  # as in ranks
        signal.signal(number, lambda *_: None)
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, the pages that ranks share
    server = _Requests(socket.socket(fileno=descriptor), _can_fork())
    end_with(None)  # the kernel would end this process with the thread that has started it
    server.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
