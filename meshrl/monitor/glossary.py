"""The meaning of every metric: its unit, its curve in a healthy run, and the meaning of other curves.

glossary.json is the only source for docs/metrics.md, the texts under the curves of report.html, TensorBoard's
descriptions and the output of `meshrl eval`. `names` share an explanation; `<...>` in a name stands for any text.
`units` has one unit for all names, or one for each; "none" means a number without unit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """healthy: the curve of a good run. otherwise: the meaning of another curve, and what to do; may be empty. labels:
    readable names for the output of commands, one for each of `names`, or none."""

    names: Sequence[str]
    units: Sequence[str]
    healthy: str
    otherwise: str = ""
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class MetricMeaning:
    """The explanation of one metric of a run."""

    entry: Entry
    unit: str
    label: str


@cache
def meaning_of(name: str) -> MetricMeaning | None:
    """The explanation of a metric; None if there is none. Metrics of the first sync have the texts of all
    syncs."""
    name = name.removeprefix("first_") if name.startswith("first_sync/") else name
    for _, _, entries in SECTIONS:
        for entry in entries:
            for index, pattern in enumerate(entry.names):
                if re.fullmatch(re.sub("<[^>]*>", ".+", pattern), name):
                    unit = entry.units[index if len(entry.units) > 1 else 0]
                    return MetricMeaning(entry, unit, entry.labels[index] if entry.labels else name)
    return None


_FILE = resources.files("meshrl.monitor").joinpath("glossary.json")
SECTIONS: list[tuple[str, str, list[Entry]]] = [
    (section["title"], section["intro"], [Entry(**metric) for metric in section["metrics"]])
    for section in json.loads(_FILE.read_text(encoding="utf-8"))
]
"""(title, introduction, entries) of each section."""
