"""The fork server: a process that has imported a program's modules (torch is one) and forks processes that run the
program. Such a process starts in milliseconds.

`spawn.py` starts it, and requests each process over a socket. A forked process is a child of the fork server. A second
socket for each child carries its process id and its exit code to the process that requested it, and signals to the
child, so that no signal can reach a later process with the same id. Forked processes end with the fork server. The fork
server ends with the process that started it, or after its last child when no more requests can come. Needs Linux.

multiprocessing's fork server starts a process in the same time. But its children import the caller's main module, keep
the environment and the output of its first call, and continue when the caller is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import socket
import stat
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil

from meshrl.process.guard import end_with_parent
from meshrl.process.leases import sweep
from meshrl.process.spawn import command, ignore_interrupts

_REQUEST_BYTES = 1 << 16
_HARMLESS_THREADS = ("jemalloc_bg_thd",)  # of pyarrow, which some installations import; jemalloc is safe to fork
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/console")


class _RequestServer:
    """Serves requests until the process that sends them ends, or until no more can come and all children have ended."""

    def __init__(self, requests: socket.socket, may_fork: bool):
        """may_fork: False = each forked process executes a new interpreter."""
        self.requests, self.may_fork, self.pid = requests, may_fork, os.getpid()
        self.selector = selectors.PollSelector()  # epoll would share its list with the children
        self.selector.register(os.pidfd_open(os.getppid()), selectors.EVENT_READ, _end_children)
        self.selector.register(requests, selectors.EVENT_READ, self.take_request)

    def serve(self) -> None:
        while len(self.selector.get_map()) > 1:  # more than the process that sends requests
            key, _ = self.selector.select()[0]  # only one: handling it may make the other events outdated
            key.data()

    def take_request(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self.requests, _REQUEST_BYTES, 5)
        if not message:
            self.close(self.requests)
            return
        module, name, environment, folder = json.loads(message)
        pid = os.fork()
        if pid == 0:
            self.run_child(module, name, environment, folder, descriptors)
        channel, stacks, status_descriptor, out, err = descriptors
        for descriptor in (channel, stacks, out, err):
            os.close(descriptor)
        child, status = os.pidfd_open(pid), socket.socket(fileno=status_descriptor)
        self.selector.register(child, selectors.EVENT_READ, partial(self.reap, pid, child, status))
        self.selector.register(status, selectors.EVENT_READ, partial(self.send_signal, pid, status))
        _report(status, pid)

    def send_signal(self, pid: int, status: socket.socket) -> None:
        """Send a child the requested signal. The child is not reaped yet, so no other process has its id."""
        try:
            number = status.recv(1)
        except ConnectionResetError:
            number = b""
        if number:
            os.kill(pid, number[0])
        else:  # the other end is closed: no more signals can come
            self.close(status)

    def reap(self, pid: int, child: int, status: socket.socket) -> None:
        """child: its pidfd."""
        _report(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        self.selector.unregister(child)
        os.close(child)
        if status.fileno() >= 0:  # else `send_signal` has closed it
            self.close(status)

    def close(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)
        sock.close()

    def run_child(
        self, module: str, name: str, environment: dict[str, str], folder: str, descriptors: Sequence[int]
    ) -> NoReturn:
        """In the child: close the server's descriptors, and run the module as `python -m` would in this folder."""
        try:
            for key in self.selector.get_map().values():
                os.close(key.fd)  # the socket objects with these descriptors live until this process ends
            channel, stacks, status, out, err = descriptors
            os.dup2(out, 1)
            os.dup2(err, 2)
            for descriptor in (status, out, err):
                os.close(descriptor)
            _search_in(folder, environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
            os.chdir(folder)
            os.environ.update(environment)
            words = command(module, channel, stacks, self.pid, name)
            if not self.may_fork:
                os.execv(words[0], words)
            # Overwrite this process's command line, which `ps` and process/diagnosis.py read.
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end of proc(5)
            title = f"{' '.join(words[:3])} {name}".encode()[: end - start - 2] + b"\0"
            if start:
                ctypes.memset(start, ord(" "), end - start)  # else the kernel reads up to the first NUL
                ctypes.memmove(start, title, len(title))
            sys.argv = words[2:]
            importlib.import_module(module).main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _search_in(working: str, folders: str) -> None:
    """Search modules where a new interpreter with this working folder and PYTHONPATH does, which may differ from this
    process's."""
    own = [] if sys.flags.safe_path else [working]
    former = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    entries = [os.path.normpath(os.path.join(working, path)) for path in folders.split(os.pathsep) if path]
    installed = [
        path for path in sys.path[len(own) :] if path not in former or path.startswith((sys.prefix, sys.base_prefix))
    ]
    sys.path[:] = dict.fromkeys([*own, *entries, *installed])
    importlib.invalidate_caches()


def _end_children() -> NoReturn:
    """End this process's children, remove the temporary resources that they leave, and end."""
    for child in psutil.Process().children():
        child.kill()
    with contextlib.suppress(ChildProcessError):  # all have ended
        while True:
            os.wait()
    sweep()
    os._exit(0)


def _report(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # no process waits for the report any more
        status.send(str(number).encode())


def _can_fork() -> bool:
    """Whether a forked child works: with other threads it may hang; it can't use a device that is initialised here."""
    child = os.fork()  # makes OpenBLAS end its threads; it starts them again when it needs them
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    threads = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            threads.append((task / "comm").read_text().strip())
    return len([name for name in threads if name not in _HARMLESS_THREADS]) == 1 and not _open_devices()


def _open_devices() -> list[str]:
    """Open files of this process under /dev that are drivers of accelerators: all except terminals and similar."""
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists this folder
            if stat.S_ISCHR(link.stat().st_mode):
                opened.append(str(link.readlink()))
    return [path for path in opened if not path.startswith(_HARMLESS_DEVICES)]


def main() -> None:
    """Arguments: the descriptor of the socket for requests, the id of the process that sends them, spaces that reserve
    room for the command lines of children, and the modules to import."""
    descriptor, starter = int(sys.argv[1]), int(sys.argv[2])
    end_with_parent(starter)
    ignore_interrupts()
    gc.disable()  # imports make half a million objects and no garbage; each collection would look at all of them
    for module in sys.argv[4:]:
        importlib.import_module(module)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # `_can_fork` knows
    gc.enable()
    gc.collect()
    gc.freeze()  # else a collection in a child would write to, and so copy, the pages that children share
    server = _RequestServer(socket.socket(fileno=descriptor), _can_fork())
    end_with_parent(None)  # else the kernel would end this process with the thread that started it
    server.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
