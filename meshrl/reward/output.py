"""The output of a reward worker: all of it is read, and a limited amount goes to rewards.log in the run's folder, so
that a reward function that prints a lot, and a full disk, delay no grading."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import IO

Log = Callable[..., None]
"""Called with lines of text."""

BYTES_PER_S = 1 << 16  # of a worker; what exceeds it is left out
_LINE_BYTES = 4096  # longer lines are divided
_TAIL_BYTES = 2000


class WorkerOutput:
    """A pipe for stdout and stderr of the process `name`, and a thread that reads it until all processes with its write
    end have ended."""

    def __init__(self, name: str, log: Log | None):
        self._name, self._log, self._tail = name, log, b""
        reader, writer = os.pipe()
        self.write_end: IO[bytes] = open(writer, "wb", buffering=0)  # noqa: SIM115, its user closes it
        self._thread = threading.Thread(target=self._copy, args=(reader,), daemon=True)
        self._thread.start()

    def tail(self, wait_s: float) -> str:
        """The last output, after waiting for its end at most so long."""
        self._thread.join(wait_s)
        return self._tail.decode(errors="replace").strip()

    def _copy(self, reader: int) -> None:
        rest, left_out, second, room = b"", 0, 0, 0
        with open(reader, "rb", buffering=0) as pipe:
            while chunk := pipe.read(BYTES_PER_S):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
                now = int(time.monotonic())
                if now != second:
                    second, room = now, BYTES_PER_S
                room -= len(chunk)
                if room < 0:
                    left_out += len(chunk)
                    continue
                rest = self._write(rest, left_out, chunk)
                left_out = 0
        self._write(rest, left_out, b"\n")

    def _write(self, rest: bytes, left_out: int, chunk: bytes) -> bytes:
        """Log the complete lines of `rest` and `chunk`, between which bytes are left out. Returns the other bytes."""
        mark = f"\n[{left_out} bytes of output left out]\n".encode() if left_out else b""
        *lines, rest = (rest + mark + chunk).split(b"\n")
        while len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest[:_LINE_BYTES]], rest[_LINE_BYTES:]
        parts = [line[i : i + _LINE_BYTES] for line in lines for i in range(0, len(line), _LINE_BYTES)]
        if parts and self._log is not None:
            self._log(*(f"{self._name}: {part.decode(errors='replace')}" for part in parts))
        return rest
