"""JSON lines that any reader accepts and that keep NaN: non-finite numbers are the texts "NaN", "Infinity" and
"-Infinity", as in proto3's JSON mapping. Python's `float` reads them back as they stand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, decode, lines_of, open_plain, parse_json, read_json


def to_line(record: dict[str, Any]) -> str:
    """One line of strict JSON with its newline.

    Raises: TypeError for a value that is no plain JSON.
    """
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_named(record), ensure_ascii=False, allow_nan=False) + "\n"


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {k: _named(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(v) for v in value]
    return value


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """All whole records of a file. A last line without its newline is what a killed writer left, and is not one.

    Raises: DataError naming file and line.
    """
    number = 0
    try:
        with open_plain(Path(path)) as file:
            for line in lines_of(file):
                number += 1
                if line.endswith(b"\n"):
                    yield _record(line)
    except Unreadable as cause:
        raise DataError(f"{path}:{number}: {cause}" if number else f"{path}: {cause}") from cause


def _record(line: bytes) -> dict[str, Any]:
    found = parse_json(decode(line))
    if not isinstance(found, dict):
        raise Unreadable(f"a JSON {type(found).__name__}, where each line is one object")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """A file that is one object. Raises: DataError naming it."""
    try:
        return read_json(path)
    except Unreadable as cause:
        raise DataError(f"{path}: {cause}") from cause


@contextmanager
def picking(where: str, what: str) -> Iterator[None]:
    """Around what picks the fields of a record out of a file that may be damaged, or of another program.

    Raises: DataError that says where, and that this is not `what`.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as cause:
        raise DataError(f"{where}: not {what}: {type(cause).__name__}: {cause!s:.300}") from cause
