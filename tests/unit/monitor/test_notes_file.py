"""run_notes.txt: the notes of a run with their times."""

from __future__ import annotations

import time
from pathlib import Path

from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.notes import NOTES_FILE, NotesFile, important


def test_notes_wait_until_the_file_is_open_and_continue_an_existing_file(tmp_path: Path):
    at = time.strftime("%F %T", time.localtime(1e9))
    (tmp_path / NOTES_FILE).write_text("an earlier part\n")
    notes = NotesFile(tmp_path, FailedWrites(), clock=lambda: 1e9)
    notes.write("before")
    assert (tmp_path / NOTES_FILE).read_text() == "an earlier part\n"
    notes.open()
    notes.write("a screen \x1b[2J that is erased")
    expected = f"an earlier part\n{at}  before\n{at}  a screen \\x1b[2J that is erased\n"
    assert (tmp_path / NOTES_FILE).read_text() == expected


def test_a_run_without_notes_has_no_file(tmp_path: Path):
    NotesFile(tmp_path, FailedWrites()).open()
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_can_not_be_written_is_counted_and_written_with_the_next_one(tmp_path: Path):
    writes = FailedWrites()
    notes = NotesFile(tmp_path, writes)
    notes.open()
    (tmp_path / NOTES_FILE).mkdir()
    notes.write("first")
    assert writes.counts == {NOTES_FILE: 1}
    (tmp_path / NOTES_FILE).rmdir()
    notes.write("second")
    texts = [line.partition("  ")[2] for line in (tmp_path / NOTES_FILE).read_text().splitlines()]
    assert texts == ["first", "second"]


def test_a_file_that_exceeds_its_limit_is_renamed_and_a_new_one_begins(tmp_path: Path):
    log = NotesFile(tmp_path, FailedWrites(), name="rewards.log", max_bytes=1000)
    log.open()
    for number in range(1000):
        log.write(f"worker 0: line {number}", "worker 1: another")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rewards.log", "rewards.old.log"]
    assert all(path.stat().st_size < 1200 for path in tmp_path.iterdir())
    assert "line 999" in (tmp_path / "rewards.log").read_text()


def test_lines_that_can_not_be_written_do_not_fill_the_memory(tmp_path: Path):
    log = NotesFile(tmp_path, FailedWrites())
    for number in range(3000):
        log.write(str(number))
    log.open()
    texts = [line.partition("  ")[2] for line in (tmp_path / NOTES_FILE).read_text().splitlines()]
    assert texts == [str(number) for number in range(2000, 3000)]


def test_notes_that_every_run_has_are_not_among_the_important_ones():
    lines = ["eval after 5 steps: mean@1 0.5", "wrote a/model", "held-out 0.5 -> 0.6", "rank 1 failed"]
    assert important("".join(f"12:01  {line}\n" for line in lines)) == ["12:01  rank 1 failed"]
