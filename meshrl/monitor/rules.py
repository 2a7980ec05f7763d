"""Rules of the glossary that decide whether a curve is suspicious, such as {"newest_above": 0.2}.

The newest and the first values are means over a tenth of the curve, of at least five values. A curve that is too short
for a rule is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
