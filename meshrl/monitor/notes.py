"""run_notes.txt in a run's folder: the lines of text that the run prints for its user, each with its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from meshrl.core.terminal import printable
from meshrl.monitor.failed_writes import FailedWrites

NOTES_FILE = "run_notes.txt"


class NotesFile:
    """Appends each note as `2026-11-24 14:30:00  text`, with control characters escaped.

    Before `open`, notes wait, because a run that is refused changes no file in its folder. Notes whose write fails wait
    for the next note. writes: counts these failures, which end no run.
    """

    def __init__(self, folder: Path, writes: FailedWrites, clock: Callable[[], float] = time.time):
        self._path, self._writes, self._clock = folder / NOTES_FILE, writes, clock
        self._waiting: list[str] = []
        self._is_open = False

    def write(self, text: str) -> None:
        """Add a note with the current time."""
        at = time.strftime("%F %T", time.localtime(self._clock()))
        self._waiting.append(f"{at}  {printable(text)}\n")
        self._write_waiting()

    def open(self) -> None:
        """Continue the file in the run's folder, or begin it."""
        self._is_open = True
        self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._is_open or not self._waiting:
            return
        count = len(self._waiting)  # another thread may add a note meanwhile
        with self._writes.attempt(NOTES_FILE):
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(self._waiting[:count]))
            del self._waiting[:count]
