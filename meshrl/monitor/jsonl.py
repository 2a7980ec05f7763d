"""JSON lines that any reader accepts and that keep NaN: non-finite numbers are the texts "NaN", "Infinity" and
"-Infinity", as in proto3's JSON mapping. Python's `float` reads them back as they stand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
    """All whole records of a file. A last line without its newline is what a killed writer left, and is not one."""
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
