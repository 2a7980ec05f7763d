"""The clinic's runs match the rules, their results and the page. Making them takes minutes: make clinic."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from clinic import RESULTS, SEED, cases, interval, page

from meshrl.monitor.health import RULES

ROOT = Path(__file__).parents[2]


def test_each_rule_has_three_sick_runs_and_there_are_ten_healthy_ones():
    of = Counter(case.rule for case in cases())
    assert of.pop("") >= 10 and of == {rule.name: 3 for rule in RULES if rule.means}
    assert all(case.seed >= SEED for case in cases()) and len({case.seed for case in cases()}) == len(cases())
    assert sum(bool(case.edit) for case in cases()) <= 4  # the others are real


def test_the_recorded_results_are_those_of_the_runs_and_the_page_shows_them():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert list(results) == [case.name for case in cases()], "run: make clinic"
    assert {name: row["seed"] for name, row in results.items()} == {case.name: case.seed for case in cases()}
    assert page() == (ROOT / "docs" / "health.md").read_text(encoding="utf-8"), "run scripts/make_docs.py"


@pytest.mark.parametrize(
    ("found", "total", "low", "high"),
    [(0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (8, 10, 0.490, 0.943), (50, 100, 0.404, 0.596)],
)
def test_the_interval_is_that_of_wilson(found: int, total: int, low: float, high: float):
    """The values of R's binom::binom.wilson."""
    assert interval(found, total) == pytest.approx((low, high), abs=5e-4)
