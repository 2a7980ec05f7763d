"""The incidents match the code, their results and the page. Running them takes minutes: make incidents."""

from __future__ import annotations

import json
import re
from pathlib import Path

from incidents import RESULTS, incidents, page, planted_files

ROOT = Path(__file__).parents[2]


def test_each_incident_can_be_planted_and_names_its_thread():
    for each in incidents():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each.source) and each.seen and each.planted, each.name
        assert each.edits or each.only_planted, f"{each.name} changes nothing"
        for with_checks in (True, False):  # raises LookupError with the incident's name
            files = planted_files(each.faults(with_checks), ROOT)
            for name, text in files.items():
                compile(text, name, "exec")


def test_there_are_twenty_incidents_of_different_threads():
    assert len({each.source for each in incidents()}) == len({each.name for each in incidents()}) == len(incidents())
    assert len(incidents()) >= 20


def test_the_named_tests_exist():
    for each in incidents():
        path, _, test = each.test.partition("::")
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), each.name


def test_the_recorded_results_are_the_expected_ones_and_the_page_shows_them():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert list(results) == [each.name for each in incidents()], "run: make incidents"
    for each in incidents():
        recorded = " ".join(results[each.name][key] for key in ("noticed", "message", "when"))
        assert [text for text in each.expected if text not in recorded] == [], each.name
    assert page() == (ROOT / "docs" / "incidents.md").read_text(encoding="utf-8"), "run scripts/make_docs.py"
