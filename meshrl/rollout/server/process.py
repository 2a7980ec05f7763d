"""A server as a child of this process: start it, wait until it is ready, diagnose its end, and leave nothing behind.

Any program that listens will do. It runs below a guard (process/guard.py), so it ends with this process, however that
ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshrl.core.errors import EngineFailure
from meshrl.process.diagnosis import exit_text, output_tail
from meshrl.process.guard import GuardedProcess
from meshrl.process.leases import LeasedFolder

_POLL_S = 0.1
_SHOWN_BYTES = 3000  # of what a server that has ended wrote last


class ServerProcess:
    """A server process, its log and a private folder, which is a good place for a socket.

    name: for people, as "vllm-2". folder: removed by `close`.
    """

    def __init__(self, name: str, command: Callable[[Path], Sequence[str]], environment: Mapping[str, str]):
        """command: made from the private folder. environment: added to this process's own."""
        self.name = name
        self._home = LeasedFolder()
        self.folder = self._home.path  # short: a Unix socket's path has 107 characters at most
        self._log = (self.folder / "log.txt").open("w+b")
        self._process = GuardedProcess(
            "meshrl.process.guard",
            [str(self.folder), *command(self.folder)],
            output=self._log,
            environment=environment,
            pass_fds=[self._home.fd],  # after this process's end the guard has the lease, until it removes the folder
        )

    @property
    def pid(self) -> int:
        """Of the guard, from which everything of the server descends."""
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], deadline_s: float, key: str = "the deadline") -> None:
        """Block until the server is ready. Raises: EngineFailure when it ends before, or misses the deadline, which is
        the value of that key."""
        until = time.monotonic() + deadline_s
        while not ready():
            failure = ""
            if self.has_ended():
                failure = "ended before it was ready"
            elif time.monotonic() > until:
                failure = f"was not ready after {deadline_s:g} s; a large model may need longer ({key})"
            if failure:
                diagnosis = self.diagnosis()
                self.close()
                raise EngineFailure(f"{self.name} {failure}{diagnosis}")
            time.sleep(_POLL_S)

    def has_ended(self) -> bool:
        return self._process.exit_code() is not None

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends by itself in that time, or has. Blocks."""
        return self._process.exit_code(seconds) is not None

    def diagnosis(self) -> str:
        """How it ended, if it did, and the end of what it wrote: for the tail of an error."""
        code = self._process.exit_code()
        how = "" if code is None else f" ({exit_text(code)})"
        wrote = "" if self._log.closed else output_tail(self._log, _SHOWN_BYTES)
        return f"{how}; it wrote last:\n{wrote}" if wrote else f"{how}; it wrote nothing"

    def close(self) -> None:
        """Kill the server and all that it started, and remove its folder; safe to call twice."""
        self._process.kill()
        self._log.close()
        self._home.close()
