"""The rules that decide whether a curve is suspicious."""

from __future__ import annotations

import math

import pytest

from meshrl.monitor.glossary import RULES, SECTIONS, judge, rule_text, unhealthy

FALLING = [1.0 * 0.9**i for i in range(40)]


@pytest.mark.parametrize(
    ("rule", "values", "is_suspicious"),
    [
        ({"ever_above": 0}, [0.0, 0.1, 0.0], True),
        ({"ever_above": 0}, [0.0], False),
        ({"first_above": 0.9}, [1.0] * 5 + [0.0] * 15, True),
        ({"first_above": 0.9}, [0.0] * 15 + [1.0] * 5, False),
        ({"newest_above": 0.2}, [0.0] * 15 + [1.0] * 5, True),
        ({"newest_above": 0.2}, [1.0] * 15 + [0.0] * 5, False),
        ({"newest_above": 0.2}, [0.1, math.nan, 0.1, 0.1, 0.1, 0.1], False),
        ({"newest_above": 0.2}, [0.1] * 4 + [math.inf], True),
        ({"newest_below": -0.1}, [-math.inf] * 20, True),
        ({"ever_above": 0}, [0.0, math.inf, 0.0], True),
        ({"change_above": 1.1}, [1.0] * 10 + [math.inf] * 10, True),
        ({"newest_below": 0.9, "newest_above": 1.1}, [1.2] * 5, True),
        ({"newest_below": 0.9, "newest_above": 1.1}, [0.8] * 5, True),
        ({"newest_below": 0.9, "newest_above": 1.1}, [1.0] * 5, False),
        ({"change_below": 0.05}, FALLING, True),
        ({"change_below": 0.01}, FALLING, False),
        ({"change_above": 1.1}, FALLING[::-1], True),
        ({"spikes_above": 0.1}, [1.0] * 20 + [1.0, 1.0, 1.0, 50.0] * 5, True),
        ({"spikes_above": 0.1}, [50.0] * 10 + [1.0] * 29 + [50.0], False),  # one spike, and a high start
        ({"spikes_above": 0.1}, [0.0] * 36 + [1.0] * 4, False),
    ],
)
def test_a_rule_judges_a_curve(rule: dict[str, float], values: list[float], is_suspicious: bool):
    found = judge(rule, values)
    assert found is not None and bool(found) == is_suspicious


@pytest.mark.parametrize("values", [[], [math.nan] * 20, [1.0] * 4])
def test_a_curve_without_enough_values_is_not_judged(values: list[float]):
    assert judge({"newest_above": 0.2}, values) is None


def test_a_change_from_zero_and_a_metric_without_a_rule_are_not_judged():
    assert judge({"change_below": 0.05}, [0.0] * 40) is None
    assert judge({}, FALLING) is None


def test_the_reason_has_the_limit_and_the_measured_value():
    assert judge({"newest_above": 0.2}, [0.977] * 9) == "the newest values above 0.2 (here 0.977)"
    assert rule_text({"newest_below": 0.9, "newest_above": 1.1}) == (
        "the newest values below 0.9 or the newest values above 1.1"
    )
    assert unhealthy(rule_text({"ever_above": 0}), "ranks died") == "a value above 0. Ranks died"
    assert unhealthy(rule_text({}), "ranks died") == "ranks died" and unhealthy("", "") == ""


def test_every_rule_of_the_glossary_is_known():
    rules = [entry.rule for _, _, entries in SECTIONS for entry in entries if entry.rule]
    assert len(rules) > 20 and all(rule.keys() <= RULES.keys() for rule in rules)
