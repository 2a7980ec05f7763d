"""Failed writes to outputs that a run does not need: they are counted, listed once, and end nothing."""

from __future__ import annotations

import io
import os
import pty
import shutil
import threading
from pathlib import Path

import pytest

from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.sinks import TerminalSink
from meshrl.monitor.status import StatusFile, read_status
from tests.waiting import wait_until


def _fail(writes: FailedWrites, output: str, times: int = 1) -> None:
    for _ in range(times):
        with writes.attempt(output), open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")


def test_failures_are_counted_and_listed_by_output():
    writes = FailedWrites()
    _fail(writes, "rollouts", 3)
    _fail(writes, "status.json")
    with writes.attempt("rollouts"):
        pass
    assert writes.is_failing("status.json") and not writes.is_failing("rollouts")
    assert writes.counts == {"rollouts": 3, "status.json": 1}
    assert writes.summary() == (
        "outputs that are not complete: rollouts: 3 writes failed (No space left on device), status.json: 1 write "
        "failed (No space left on device)"
    )


def test_the_metric_of_a_step_has_its_failures_only():
    writes = FailedWrites()
    assert [metric.sum for metric in writes.take()] == [0] and writes.summary() is None
    _fail(writes, "terminal", 2)
    (metric,) = writes.take()
    assert (metric.name, metric.sum, metric.unit) == ("monitor/failed_writes", 2, "writes")
    assert [metric.sum for metric in writes.take()] == [0]


def test_only_errors_of_the_output_are_counted():
    writes = FailedWrites()
    for error in (ValueError("units changed"), TypeError("not JSON"), KeyboardInterrupt()):
        with pytest.raises(type(error)), writes.attempt("rollouts"):
            raise error
    assert writes.counts == {}
    with writes.attempt("report.html", LookupError):
        raise LookupError("no such series")
    assert writes.summary() == "outputs that are not complete: report.html: 1 write failed (no such series)"


def test_lines_to_a_full_disk_a_broken_pipe_and_a_closed_stream_are_counted():
    reader, writer = os.pipe()
    os.close(reader)
    closed = io.StringIO()
    closed.close()
    full, broken = open("/dev/full", "w"), open(writer, "w")  # noqa: SIM115
    for stream, reason in ((full, "No space"), (broken, "Broken pipe"), (closed, "closed file")):
        writes = FailedWrites()
        sink = TerminalSink(2, stream, writes=writes)
        for step in range(2):
            sink.write(step, {"reward/mean": 0.5}, {})
        sink.note("a note")
        sink.close()
        assert writes.counts["terminal"] >= 3 and reason in str(writes.summary())
    for stream in (full, broken):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        stream.close()


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_the_thread_of_the_panel_survives_failed_writes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    before, writes = set(threading.enumerate()), FailedWrites()
    full = Terminal(open("/dev/full", "wb"))  # noqa: SIM115, its buffer can't be flushed
    sink = TerminalSink(4, full, writes=writes)
    (thread,) = set(threading.enumerate()) - before
    assert wait_until(lambda: writes.counts.get("terminal", 0) > 10) and thread.is_alive()  # it draws again and again
    sink.note("a note")
    sink.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_lost_terminal_ends_no_run(monkeypatch: pytest.MonkeyPatch):
    """When the other end of a pseudo-terminal is closed, writes raise EIO."""
    monkeypatch.setenv("TERM", "xterm-256color")
    controller, terminal = pty.openpty()
    writes = FailedWrites()
    with open(terminal, "w") as stream:
        sink = TerminalSink(4, stream, writes=writes)
        os.close(controller)
        sink.write(0, {"reward/mean": 0.5}, {})
        sink.note("a note")
        sink.close(failed=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
    assert writes.counts["terminal"] >= 1 and "Input/output error" in str(writes.summary())


def test_a_terminal_without_unicode_shows_escapes():
    raw = io.BytesIO()
    sink = TerminalSink(1, io.TextIOWrapper(raw, encoding="ascii"))
    sink.note("漢 \x1b[2J é")
    assert raw.getvalue() == rb"\u6f22 \x1b[2J \xe9" + b"\n"


def test_a_panel_shows_no_control_characters_of_notes_and_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal(io.BytesIO(), encoding="utf-8")
    sink = TerminalSink(1, stream)
    sink.note("answer \x1b[2J\x1b]0;title\x07 \u202e")
    sink.write(0, {"reward/term/\x1b[2J": 1.0}, {})
    sink.close()
    shown = stream.buffer.getvalue().decode()
    assert "\x1b[2J" not in shown and "\x07" not in shown and "\u202e" not in shown
    assert r"answer \x1b[2J\x1b]0;title\x07 \u202e" in shown and r"term/\x1b[2J " in shown


def test_a_removed_folder_of_rollouts_is_created_again_and_a_blocked_one_is_counted(tmp_path: Path):
    writes = FailedWrites()
    log = RolloutLog(tmp_path, str, writes)
    log.write(0, [])
    shutil.rmtree(tmp_path / "rollouts")
    assert log.write(1, []).exists() and writes.counts == {}
    shutil.rmtree(tmp_path / "rollouts")
    (tmp_path / "rollouts").touch()
    log.write(2, [])
    assert writes.counts == {"rollouts": 1}
    (tmp_path / "rollouts").unlink()
    assert log.write(3, []).exists() and not writes.is_failing("rollouts")


def test_the_thread_of_the_status_file_survives_a_removed_folder(tmp_path: Path):
    writes, folder = FailedWrites(), tmp_path / "run"
    folder.mkdir()
    file = StatusFile(folder, 10, writes=writes)
    (folder / "status.json").unlink()
    folder.rmdir()
    file.entered("rollout")
    assert wait_until(lambda: writes.counts == {"status.json": 1})
    folder.mkdir()
    file.entered("train")
    assert wait_until(lambda: (folder / "status.json").exists() and read_status(folder).phase == "train")
    (folder / "status.json").unlink()
    folder.rmdir()
    file.close()
    file.restore_file()
    assert writes.counts == {"status.json": 3}
