"""JSON lines that any reader accepts and that preserve NaN: non-finite numbers are the texts "NaN", "Infinity" and
"-Infinity", as in proto3's JSON mapping. Python's `float` converts these texts to numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, decode, lines_of, open_plain, parse_json, read_json


def to_line(record: dict[str, Any]) -> str:
    """One line of strict JSON with its newline. Arrays of one dim become lists of numbers, equal to the bit when they
    are read.
    """
    strict = _strict(record)
    try:
        return orjson.dumps(strict, option=_OPTIONS).decode()
    except TypeError:  # keys that are numbers, integers of more than 64 bits, lone surrogates
        text = json.dumps(strict, ensure_ascii=False, allow_nan=False, default=_listed) + "\n"
        return text.encode(errors="replace").decode()  # UTF-8 has no lone surrogates


_PLAIN_ONLY = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_OPTIONS = _PLAIN_ONLY | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def _strict(value: Any) -> Any:
    """The value with texts in place of numbers that are not finite, and float64 in place of shorter floats: their
    decimals would be rounded twice by a reader with float64."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if isinstance(value, np.generic):
        return _strict(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(np.float64) if np.isfinite(value).all() else _strict(value.tolist())
    return value


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def read_lines(path: str | Path, containing: bytes = b"", all_complete: bool = False) -> Iterator[dict[str, Any]]:
    """All complete records of a file, of those lines that contain these bytes. A last line without a newline is
    ignored, or an error if all must be complete: its writer was killed, or is writing it.
    """
    number = 0
    try:
        with open_plain(Path(path)) as file:
            for line in lines_of(file):
                number += 1
                if line.endswith(b"\n") and containing in line:
                    record = parse_json(decode(line))
                    if not isinstance(record, dict):
                        raise Unreadable(f"a JSON {type(record).__name__}; each line must be one object")
                    yield record
                elif all_complete and not line.endswith(b"\n"):
                    raise Unreadable("the line is incomplete: its writer was killed, or is writing it")
    except Unreadable as cause:
        raise DataError(f"{path}:{number}: {cause}" if number else f"{path}: {cause}") from cause


def parse_large(data: bytes) -> Any:
    """The value of a large JSON text of another program, fast and with few checks."""
    return orjson.loads(data)


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that contains one object."""
    try:
        return read_json(path)
    except Unreadable as cause:
        raise DataError(f"{path}: {cause}") from cause


@contextmanager
def data_errors(place: str, expected: str) -> Iterator[None]:
    """Context for code that reads fields of a record; the file may be damaged, or written by another program."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as cause:
        reason = f"{cause} is missing" if isinstance(cause, KeyError) else f"{cause!s:.300}"
        raise DataError(f"{place}: not {expected}: {reason}") from cause
