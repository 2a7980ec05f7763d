"""Reading files of other programs within limits, and writing files so that no reader ever sees half of one.

Only regular files are read, at most the given number of bytes, and only unambiguous JSON. A fault of a file is raised
as Unreadable, with a text that follows the path and a colon; the caller adds the path and raises its own error.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from meshrl.core.errors import MeshrlError, OutputError

MAX_TEXT_BYTES = 64 << 20  # of a file that is read at once
MAX_LINE_BYTES = 64 << 20  # of a line of JSON; a row of base64 images stays well below
MAX_DEPTH = 100  # of lists and objects in each other; Python's own recursion ends at a thousand
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a disk"))


class Unreadable(ValueError):
    """A file can't be used. The text gives the reason, and follows the file's path and a colon."""


def size_of(path: Path) -> int:
    """Bytes of a regular file, also behind links. Opening a pipe would block, and a device may have no end."""
    try:
        status = path.stat()
    except FileNotFoundError as cause:
        raise Unreadable("no such file") from cause
    except (OSError, ValueError) as cause:  # a loop of links, a name too long or with a NUL, a folder closed to us
        raise Unreadable(f"can't be looked up ({getattr(cause, 'strerror', None) or cause})") from cause
    if stat.S_ISDIR(status.st_mode):
        raise Unreadable("is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise Unreadable(f"is {kind}, not a regular file; write its content to a file, and name that file")
    return status.st_size


def is_there(path: Path) -> bool:
    """Whether the path exists; False for one that can't be looked up (a loop of links, a name that is too long)."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def is_private(path: Path) -> bool:
    """Whether this user or root owns it, and only the owner can write there: no group, except one of this user alone,
    as many systems make for each user."""
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
        return False
    if not status.st_mode & stat.S_IWGRP:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    is_own = user.pw_gid == status.st_gid != 0 and group.gr_name == user.pw_name
    return is_own and {*group.gr_mem} <= {user.pw_name}


def open_plain(path: Path) -> BinaryIO:
    """A regular file, opened to read its bytes. Raises: Unreadable."""
    size_of(path)
    try:
        return path.open("rb")
    except OSError as cause:
        raise Unreadable(f"can't be opened ({cause.strerror or cause})") from cause


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The content of a UTF-8 file, without a byte order mark. Raises: Unreadable."""
    with open_plain(path) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as cause:
            raise Unreadable(f"can't be read ({cause.strerror or cause})") from cause
    if len(data) > max_bytes:
        raise Unreadable(f"more than {max_bytes:,} bytes, the limit for such a file")
    return decode(data)


def decode(data: bytes) -> str:
    """UTF-8, with or without a byte order mark. Raises: Unreadable naming the byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise Unreadable(f"not UTF-8 at byte {cause.start}; save the file as UTF-8") from cause


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; never more than one in memory. Raises: Unreadable, also for a line above MAX_LINE_BYTES."""
    while True:
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except OSError as cause:
            raise Unreadable(f"can't be read further ({cause.strerror or cause})") from cause
        if len(line) > MAX_LINE_BYTES:
            raise Unreadable(f"a line of more than {MAX_LINE_BYTES:,} bytes; each line should be one JSON object")
        if not line:
            return
        yield line


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file contains. Raises: Unreadable."""
    value = parse_json(read_text(path))
    if not isinstance(value, dict):
        raise Unreadable(f"not a JSON object {{key: value}}, but a {type(value).__name__}")
    return value


def parse_json(text: str, constants: bool = True) -> Any:
    """The value of unambiguous JSON: no key twice in an object, no lone surrogate, no nesting above MAX_DEPTH.

    constants: whether NaN, Infinity and -Infinity are accepted, as Python writes them.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=None if constants else _refuse_constant)
        if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            raise RecursionError
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as cause:
        raise Unreadable(f"not JSON that can be read: nested more than {MAX_DEPTH} deep") from cause
    except UnicodeEncodeError as cause:
        raise Unreadable("it contains a lone surrogate (\\ud800 to \\udfff), which is not valid text") from cause
    except ValueError as cause:
        raise Unreadable(f"not JSON ({cause})") from cause
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice in one object")
    return made


def _depth(value: Any) -> int:
    """The nesting depth of lists and objects, found without recursion."""
    deepest, left = 0, [(value, 1)]
    while left:
        here, depth = left.pop()
        deepest = max(deepest, depth)
        inner = here.values() if isinstance(here, dict) else here
        left += [(entry, depth + 1) for entry in inner if isinstance(entry, (dict, list))]
    return deepest


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`. The block writes a file or a folder there, which is renamed to
    `path` at the end of the block. If the block raises, `path` stays as it was, and the temporary file is removed. A
    folder replaces only an empty folder.
    """
    aside = path.with_name(path.name + ".aside")
    _remove(aside)  # of a killed writer
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            _remove(aside)  # on a full disk it would take the room of other files
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def output_errors(path: Path, advice: str, kind: type[MeshrlError] = OutputError) -> Iterator[None]:
    """Context for code that writes `path` or files below it. advice: what the user can do, without a full stop.

    Raises: an error of this kind in place of an OSError, with the file and the system's reason.
    """
    try:
        yield
    except OSError as cause:
        name = str(cause.filename or path).removesuffix(".aside")
        raise kind(f"{name} can't be written: {cause.strerror or cause}. {advice}") from cause


CONTINUE_LATER = "Make room or make it writable, then continue the run from its last checkpoint with run.resume=auto"


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file: readers see the complete old text or the complete new one."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")
