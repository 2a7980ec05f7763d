"""digests.jsonl of a run's folder, which `meshrl replay` reads: a line for each start of the run, with what its results
depend on, and a line for each step, with the digests of its optimizer steps (loops/step_record.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrl.core.errors import DataError
from meshrl.core.files import write_text
from meshrl.core.types import SCHEMA
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.jsonl import data_errors, read_lines, to_line
from meshrl.monitor.sinks import split_lines

DIGESTS_FILE = "digests.jsonl"
Record = dict[str, Any]


class DigestLog:
    """Appends lines to the file in `folder`. first_step: the first step that the run makes; lines of this and later
    steps are dropped. A failed write is counted and ends no run."""

    def __init__(self, folder: Path, first_step: int, writes: FailedWrites):
        self._path, self._writes = folder / DIGESTS_FILE, writes
        with writes.attempt(DIGESTS_FILE, DataError):
            if self._path.exists():
                write_text(self._path, split_lines(self._path, first_step)[0])

    def write(self, step: int, record: Record) -> None:
        with self._writes.attempt(DIGESTS_FILE), self._path.open("a", encoding="utf-8") as file:
            file.write(to_line({"schema": SCHEMA, "step": step, **record}))


def read_digests(run: Path) -> tuple[dict[int, Record], dict[int, Record]]:
    """The starts of a run by the first step that each made, and its steps by number."""
    starts, steps = dict[int, Record](), dict[int, Record]()
    for number, record in enumerate(read_lines(run / DIGESTS_FILE), start=1):
        with data_errors(f"{run / DIGESTS_FILE}:{number}", "a record of a start or a step"):
            if record["schema"] != SCHEMA:
                raise ValueError(f"schema {record['schema']!r}; this version reads schema {SCHEMA}")
            step = int(record["step"])
            if "config" in record:
                starts[step] = record
            else:
                record["updates"], record["trained"], record["version"], record["threshold"]
                steps[step] = record
    return starts, steps
