"""Files of lines of text with their times in a run's folder: run_notes.txt with the lines that the run prints for its
user, and rewards.log with the output of its reward functions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from meshrl.core.terminal import printable
from meshrl.monitor.failed_writes import FailedWrites

NOTES_FILE, REWARDS_FILE = "run_notes.txt", "rewards.log"
REWARDS_BYTES = 4 << 20  # so much of rewards.log is retained when a new file begins
_ROUTINE = (
    *("run ", "eval ", "evaluates ", "decided: ", "first prompt", "ready ", "disk: ", "wrote ", "saved "),
    *("held-out ", "best model", "done: ", "attention auto: "),
)


class NotesFile:
    """Appends each note as `2026-11-24 14:30:00  text`, with control characters escaped. Thread-safe.

    Before `open`, notes wait, because a run that is refused changes no file in its folder. Notes whose write fails wait
    for the next note. writes: counts these failures, which end no run. max_bytes: a file that exceeds this is renamed
    to NAME.old.SUFFIX, in place of an older one, and a new one begins; None = no limit.
    """

    def __init__(
        self,
        folder: Path,
        writes: FailedWrites,
        clock: Callable[[], float] = time.time,
        *,
        name: str = NOTES_FILE,
        max_bytes: int | None = None,
    ):
        self._path, self._writes, self._clock = folder / name, writes, clock
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        self._waiting: list[str] = []
        self._is_open = False

    def write(self, *texts: str) -> None:
        """Add notes with the current time."""
        at = time.strftime("%F %T", time.localtime(self._clock()))
        with self._lock:
            self._waiting += [f"{at}  {printable(text)}\n" for text in texts]
            self._write_waiting()
            del self._waiting[:-1000]  # lines that can't be written; the oldest are dropped

    def open(self) -> None:
        """Continue the file in the run's folder, or begin it."""
        with self._lock:
            self._is_open = True
            self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._is_open or not self._waiting:
            return
        with self._writes.attempt(self._path.name):
            if self._max_bytes is not None and self._path.exists() and self._path.stat().st_size > self._max_bytes:
                self._path.replace(self._path.with_suffix(f".old{self._path.suffix}"))
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(self._waiting))
            self._waiting.clear()


def important(notes: str) -> list[str]:
    """The lines of a run_notes.txt without those that every run has."""
    return [line for line in notes.splitlines() if not line.partition("  ")[2].startswith(_ROUTINE)]
