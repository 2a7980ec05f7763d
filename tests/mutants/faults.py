"""All faults that the tests must catch, read from the tables next to this file.

A table is named after the packages whose code its faults change. A fault is four lines, the last three indented by
four spaces: its name; its place; "OLD => NEW"; the test. A line that is indented by eight spaces continues the one
before it, without a space if it begins with "::". Lines that begin with # are comments. What the parts mean, fault.py
states.
"""

from __future__ import annotations

import re
from pathlib import Path

from fault import Fault


def read(table: Path) -> list[Fault]:
    text = re.sub(r"^#.*\n", "", table.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = re.sub(r"\n {8}(?=::)", "", text)
    lines = re.sub(r"\n {8}", " ", text).splitlines()
    faults = [Fault(lines[i], *(line[4:] for line in lines[i + 1 : i + 4])) for i in range(0, len(lines), 4)]
    wrong = [f.name for f in faults if f.name.startswith(" ") or " => " not in f.change or "::" not in f.test]
    if wrong:
        raise ValueError(f"{table.name}: not name, place, change and test: {wrong[0]!r}")
    return faults


FAULTS = [fault for table in sorted(Path(__file__).parent.glob("*.txt")) for fault in read(table)]
