"""Marks the cases of test tables as slow that slow_cases.yaml lists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

_FILE = Path(__file__).with_suffix(".yaml")
SLOW_CASES: dict[str, dict[str, str]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))


def mark_slow_cases(items: Iterable[pytest.Item], all_of_a_test: bool) -> None:
    """Mark the listed cases as slow. all_of_a_test: items has all cases of a test, or none. Then a pattern that matches
    none or all of them is an error."""
    seen, slow = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        file, _, name = test.partition("::")
        pattern = SLOW_CASES.get(file, {}).get(name)
        if pattern is not None:
            seen[file, name] += 1
            if re.fullmatch(pattern, case.removesuffix("]")):
                slow[file, name] += 1
                item.add_marker(pytest.mark.slow)
    wrong = [test for test, count in seen.items() if slow[test] in (0, count)]
    if all_of_a_test and wrong:
        raise pytest.UsageError(f"tests/slow_cases.yaml: the patterns match none or all of the cases of {wrong}")
