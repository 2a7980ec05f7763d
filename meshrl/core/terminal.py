"""Text for terminals: control characters are escaped, and a terminal that is closed or full ends no command."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TextIO

from meshrl.core.errors import OutputError

# C0 except tab and newline, DEL and C1, separators of lines, marks that change the direction of text, half surrogates.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters as \\xNN or \\uNNNN, except tabs and newlines. Texts of models, graders and
    files may contain sequences that erase the screen or change the order of what it shows."""
    return _CONTROL.sub(lambda c: f"\\x{ord(c[0]):02x}" if ord(c[0]) < 256 else f"\\u{ord(c[0]):04x}", text)


def command(name: str, folder: Path) -> str:
    """A command of meshrl about a folder that works in every working folder."""
    return f"meshrl {name} {shlex.quote(str(folder.resolve()))}"


def counted(number: int, noun: str) -> str:
    """Such as 1 answer, 2 answers."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_message(text: str, stream: TextIO | None = None) -> None:
    """Print a message for the user, by default on stderr. It is lost if the stream can't be written."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(printable(text), file=stream or sys.stderr, flush=True)


def print_output(text: str, end: str = "\n", is_printable: bool = False) -> None:
    """Print the result of a command on stdout. It is lost if the reader of a pipe has ended (head, less), or if stdout
    is closed. is_printable: the text was made printable before it got its colours.

    Raises: OutputError when it can't be written for another reason."""
    try:
        with contextlib.suppress(BrokenPipeError):
            if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
                print(text if is_printable else printable(text), end=end, flush=True)
    except OSError as cause:
        raise OutputError(f"stdout can't be written: {cause.strerror}. Print to another file or terminal") from cause


def open_standard_streams() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, as in `meshrl train my.yaml >&-`: otherwise the next
    files and sockets get these numbers, and all child processes print into them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(opened, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115, open until the end
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def drop_unwritten_output() -> None:
    """Drop text that stdout and stderr did not accept. Python would try to write it again when it ends, and change the
    exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # it is closed
            continue
