"""Text for terminals, and standard streams that are closed, full, or pipes without a reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.core.errors import OutputError
from meshrl.core.terminal import print_message, print_output, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("50 %\rwrong", r"50 %\x0dwrong"),
        ("\x9b2J\x85\x7f", r"\x9b2J\x85\x7f"),
        ("a\u202eb\u2066c\u200fd\u2028e\ufeff", r"a\u202eb\u2066c\u200fd\u2028e\ufeff"),
        ("\udcff", r"\udcff"),
        ("two\n\tlines, ü, 漢字, 👩\u200d🚀, \xa0", "two\n\tlines, ü, 漢字, 👩\u200d🚀, \xa0"),
    ],
)
def test_control_characters_are_escaped_and_all_other_text_stays(text: str, shown: str):
    assert printable(text) == shown


def test_a_message_is_lost_and_a_result_is_an_error_when_the_disk_is_full(monkeypatch: pytest.MonkeyPatch):
    full = open("/dev/full", "w")  # noqa: SIM115, its buffer can't be flushed when it is closed
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr(sys, "stderr", full)
    print_message("lost")
    with pytest.raises(OutputError, match=r"^stdout can't be written: No space left on device"):
        print_output("a result")
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_output_to_a_pipe_without_a_reader_and_to_a_closed_stream_is_lost(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as broken, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", broken)
        print_output("to the pipe")
        print_message("to the pipe", sys.stdout)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    for closed in (broken, None):
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "stderr", closed)
        print_output("to a closed stream")
        print_message("to a closed stream")


def test_closed_descriptors_are_opened_so_that_no_file_gets_their_numbers(tmp_path: Path):
    """A child process inherits them, too."""
    code = (
        "import subprocess, sys\n"
        "from meshrl.core.terminal import open_standard_streams\n"
        "open_standard_streams()\n"
        "file = open(sys.argv[1], 'w')\n"
        "print('on stdout', flush=True)\n"
        "print('on stderr', file=sys.stderr, flush=True)\n"
        "child = 'import os; [os.write(n, b\"from a child\") for n in (1, 2)]'\n"
        "file.write(f'{file.fileno()} {subprocess.run([sys.executable, \"-c\", child]).returncode}')\n"
    )
    closed = f'exec "{sys.executable}" -c "$0" "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, code, str(tmp_path / "file")]).returncode == 0
    assert (tmp_path / "file").read_text() == "3 0"
