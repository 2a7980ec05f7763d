"""Faults outside the ranks, for docs/faults.md, each with the test that injects it: the table of other_faults.txt."""

from __future__ import annotations

from pathlib import Path

# By title: the fault, what the run does, and the test that injects it.
OTHER_FAULTS: dict[str, tuple[tuple[str, str, str], ...]] = {}

for _section in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n[")[1:]:
    _title, *_lines = _section.splitlines()
    _texts = [line.removeprefix("    ") for line in _lines]
    OTHER_FAULTS[_title.removesuffix("]")] = tuple(zip(_texts[::3], _texts[1::3], _texts[2::3], strict=True))
