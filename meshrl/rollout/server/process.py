"""A server as a child process: start it, wait until it is ready, diagnose its end, and clean up.

The server may be any program that listens. It is a child of a guard (process/guard.py), so it also ends when this
process is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshrl.core.errors import EngineFailure
from meshrl.process.diagnosis import exit_text, first_exception, output_tail
from meshrl.process.guard import GuardedProcess
from meshrl.process.leases import LeasedFolder

_POLL_S = 0.1
_SOCKET_BYTES = 40  # of the longest name of a Unix socket that servers make in TMPDIR, with its slash: vLLM's has 37
_OUTPUT_BYTES = 3000  # the end of a server's output, shown in errors


class ServerProcess:
    """A server process, its log and a private folder, which may contain its socket.

    name: used in errors, for example "vllm-2". folder: removed by `close`.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[Path], Sequence[str]],
        environment: Mapping[str, str],
        logs: Path | None = None,
    ):
        """command: gets the private folder. environment: added to the environment of this process. logs: the folder of
        its log, to which a server of the same name appends; None = the private folder."""
        self.name = name
        self._folder_lease = LeasedFolder(107 - _SOCKET_BYTES)
        self.folder = self._folder_lease.path
        self._is_saved = logs is not None
        self._path = self.folder / "log.txt" if logs is None else logs / f"{name}.txt"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._path.open("a+b")
        self._start = self._log.seek(0, os.SEEK_END)
        self._process = GuardedProcess(
            "meshrl.process.guard",
            [str(self.folder), *command(self.folder)],
            output=self._log,
            environment={"TMPDIR": str(self.folder), **environment},
            pass_fds=[self._folder_lease.fd],  # the guard has the lease, too, until it removes the folder
        )

    def wait_until(self, ready: Callable[[], bool], deadline_s: float, key: str = "the deadline") -> None:
        """Block until the server is ready. key: the config key of the deadline, for the error."""
        until = time.monotonic() + deadline_s
        while not ready():
            failure = ""
            if self.ends_within(0):
                failure = "ended before it was ready"
            elif time.monotonic() > until:
                failure = f"was not ready after {deadline_s:g} s; a large model may need longer ({key})"
            if failure:
                diagnosis = self.diagnosis()
                self.close()
                raise EngineFailure(f"{self.name} {failure}{diagnosis}")
            time.sleep(_POLL_S)

    def ends_within(self, seconds: float) -> bool:
        """Whether the server has ended, or ends by itself within that time. Blocks."""
        return self._process.exit_code(seconds) is not None

    def diagnosis(self) -> str:
        """The exit status of the server, if it has ended, the first exception in its output, and the end of its output:
        for the end of an error text."""
        code = self._process.exit_code()
        how = "" if code is None else f" ({exit_text(code)})"
        wrote = "" if self._log.closed else output_tail(self._log, _OUTPUT_BYTES, self._start)
        if not wrote:
            return f"{how}; it wrote no output"
        cause = first_exception(self._log, self._start)
        first = f"The first exception in its output is:\n{cause}\n" if cause else ""
        saved_in = f" (all of it is in {self._path})" if self._is_saved else ""
        return f"{how}. {first}The end of its output{saved_in}:\n{wrote}"

    def close(self) -> None:
        """Kill the server and all processes that it started, and remove its folder; safe to call twice."""
        self._process.kill()
        self._log.close()
        self._folder_lease.close()
