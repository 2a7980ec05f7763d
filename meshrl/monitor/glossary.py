"""The meaning of every metric: its unit, its curve in a healthy run, and the meaning of other curves.

glossary.json is the only source for docs/metrics.md, the texts under the curves of report.html, TensorBoard's
descriptions and the output of `meshrl eval`. `names` share an explanation; `<...>` in a name stands for any text.
`units` has one unit for all names, or one for each; "none" means a number without unit.

RULES decide whether a curve is suspicious, such as {"newest_above": 0.2}. The newest and the first values are means
over a tenth of the curve, of at least five values. A curve that is too short for a rule is not judged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import median

_AT_LEAST = 5  # values in a mean


def judge(rule: Mapping[str, float], values: Sequence[float]) -> str | None:
    """What makes the curve suspicious, with the measured value; "" if nothing does; None if it can't be judged."""
    numbers = [value for value in values if not math.isnan(value)]
    if numbers and all(math.isnan(value) for value in values[-_AT_LEAST:]):
        return "the newest values are NaN"
    measures = {kind: RULES[kind][0](numbers) for kind in rule if len(numbers) >= RULES[kind][1]}
    judged = {kind: measured for kind, measured in measures.items() if not math.isnan(measured)}
    for kind, measured in judged.items():
        if measured > rule[kind] if "_above" in kind else measured < rule[kind]:
            return f"{rule_text({kind: rule[kind]})} (here {measured:.3g})"
    return "" if judged else None


def unhealthy(condition: str, otherwise: str) -> str:
    """What makes a curve suspicious, and the meaning; both may be empty."""
    return f"{condition}. {otherwise[:1].upper()}{otherwise[1:]}" if condition else otherwise


def rule_text(rule: Mapping[str, float]) -> str:
    """A rule in words; several conditions are joined by `or`."""
    return " or ".join(RULES[kind][2].format(limit) for kind, limit in rule.items())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # unlike fmean, also of opposite infinities: NaN


def _newest(values: Sequence[float]) -> float:
    return _mean(values[-max(_AT_LEAST, len(values) // 10) :])


def _first(values: Sequence[float]) -> float:
    return _mean(values[: max(_AT_LEAST, len(values) // 10)])


def _ratio_to_first(values: Sequence[float]) -> float:
    first = _first(values)
    return _newest(values) / first if first > 0 else math.nan


def _spikes(values: Sequence[float]) -> float:
    late = values[len(values) // 2 :]
    return sum(value > 10 * median(late) > 0 for value in late) / len(late)


RULES: dict[str, tuple[Callable[[Sequence[float]], float], int, str]] = {
    "ever_above": (max, 1, "a value above {:g}"),
    "first_above": (_first, _AT_LEAST, "the first values above {:g}"),
    "newest_above": (_newest, _AT_LEAST, "the newest values above {:g}"),
    "newest_below": (_newest, _AT_LEAST, "the newest values below {:g}"),
    "change_above": (_ratio_to_first, 2 * _AT_LEAST, "the newest values above {:g} times the first ones"),
    "change_below": (_ratio_to_first, 2 * _AT_LEAST, "the newest values below {:g} times the first ones"),
    "spikes_above": (_spikes, 4 * _AT_LEAST, "more than {:.0%} of the newer half above 10 times its median"),
}
"""Kind of a rule -> what is measured, of at least how many values, and the condition in words."""


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """healthy: the curve of a good run. otherwise: the meaning of another curve, and what to do; may be empty. labels:
    readable names for the output of commands, one for each of `names`, or none. rule: when a curve is suspicious
    (RULES); empty where no rule is right for all runs."""

    names: Sequence[str]
    units: Sequence[str]
    healthy: str
    otherwise: str = ""
    labels: Sequence[str] = ()
    rule: Mapping[str, float] = field(default_factory=dict)


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
