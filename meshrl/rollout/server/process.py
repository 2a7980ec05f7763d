"""A server as a child of this process: started, waited for, asked how it ended, and never left behind.

Any program that listens will do. It runs below `rollout/guard.py`, so it ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshrl.core.errors import EngineFailure
from meshrl.monitor.processes import kill_descendants
from meshrl.process.leases import LeasedFolder

_POLL_S = 0.1
_SHOWN_CHARACTERS = 3000  # of what a dead server wrote last


class ServerProcess:
    """Owns the process, its log and a private folder, which is a good place for a socket.

    name: for people, as "vllm-2". folder: removed by `close`.
    """

    def __init__(self, name: str, command: Callable[[Path], Sequence[str]], environment: Mapping[str, str]):
        """command: made from the private folder. environment: on top of this process's own."""
        self.name = name
        self._home = LeasedFolder()
        self.folder = self._home.path  # short: a Unix socket's path has 107 characters at most
        self._log = (self.folder / "log.txt").open("w+b")
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "meshrl.rollout.guard", str(self.folder), *command(self.folder)],
            stdin=subprocess.PIPE,  # when it closes, the guard knows that this process is gone
            stdout=self._log,
            stderr=self._log,
            pass_fds=[self._home.fd],  # after this process's end the guard holds the folder, until it has removed it
            start_new_session=True,
            env={**os.environ, **environment},
        )

    @property
    def pid(self) -> int:
        """Of the guard, from which everything of the server descends."""
        return self._guard.pid

    def wait_until(self, ready: Callable[[], bool], deadline_s: float, key: str = "the deadline") -> None:
        """Block until the server is ready. Raises: EngineFailure when it ends before, or misses the deadline, which is
        the value of that key."""
        until = time.monotonic() + deadline_s
        while not ready():
            if self.has_ended():
                words = self.last_words()
                self.close()
                raise EngineFailure(f"{self.name} ended before it was ready{words}")
            if time.monotonic() > until:
                words = self.last_words()
                self.close()
                raise EngineFailure(
                    f"{self.name} was not ready after {deadline_s:g} s; a large model may need longer ({key}){words}"
                )
            time.sleep(_POLL_S)

    def has_ended(self) -> bool:
        return self._guard.poll() is not None

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends by itself in that time, or has. Blocks."""
        try:
            self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """How it ended, if it did, and the end of what it wrote: for the tail of an error."""
        status = self._guard.poll()
        how = ""
        if status is not None:
            how = f" ({signal.Signals(-status).name})" if status < 0 else f" (exit status {status})"
        log = self.folder / "log.txt"
        wrote = log.read_bytes()[-_SHOWN_CHARACTERS:].decode(errors="replace").strip() if log.is_file() else ""
        return f"{how}; it wrote last:\n{wrote}" if wrote else f"{how}; it wrote nothing"

    def close(self) -> None:
        """Kill the server and all that it started, and remove its folder; safe to call twice."""
        kill_descendants(self.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS says it the second way
            os.killpg(self.pid, signal.SIGKILL)
        self._guard.communicate()  # closes its standard input and waits
        self._log.close()
        self._home.close()
