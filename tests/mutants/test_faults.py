"""The faults of `make mutants` match the code. Testing them takes minutes and is a separate command."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from fault import Fault, find, plant
from faults import FAULTS

ROOT = Path(__file__).parents[2]
CODE = """
class Cat:
    @property
    def age(self):
        return self._age - 1  # years
    @age.setter
    def age(self, value):
        if value > 0:
            self._age = value
            self.old = (
                value - 1)
def age(): return 2 - 1
"""


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


@cache
def defined_in(file: str) -> set[str]:
    return {node.name for node in tree(file).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_code_of_a_fault_occurs_once_and_is_changed():
    unchanged = []
    for fault in FAULTS:
        _, old, new = find(fault, tree(fault.file))  # raises LookupError with the fault's name
        unchanged += [fault.name] if [*map(ast.dump, old)] == [*map(ast.dump, new)] else []
    assert unchanged == []


def test_the_test_that_catches_a_fault_exists():
    parts = [fault.test.partition("::") for fault in FAULTS]
    assert [part for part in parts if part[2].partition("[")[0] not in defined_in(part[0])] == []


def test_the_names_of_faults_are_unique():
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 25


@pytest.mark.parametrize(
    ("place", "change", "before", "after"),
    [
        ("::age", "2 - 1 => 3", "return 2 - 1", "return 3"),
        ("::Cat.age", "self.old = value-1 => self.old = 0", "self.old = value - 1", "self.old = 0"),
        ("::Cat.age", "self._age - 1 => 0", "return self._age - 1", "return 0"),
        ("::Cat", "self._age = value; self.old = value - 1 => pass", "self._age = value\n", "pass"),
        ("", "value > 0 => False", "if value > 0:", "if False:"),
    ],
)
def test_a_fault_is_planted_whatever_the_format_of_the_code(place: str, change: str, before: str, after: str):
    planted = plant(Fault("a fault", "cat.py" + place, change, ""), CODE)
    assert before in ast.unparse(ast.parse(CODE)) and before not in planted and after in planted


@pytest.mark.parametrize(
    ("place", "change", "error"),
    [
        ("::Dog.age", "value > 0 => False", "'a fault': cat.py does not define Dog.age"),
        ("::age", "3 - 1 => 0", "`3 - 1` occurs 0 times in cat.py::age"),
        ("::Cat.age", "value => 0", "`value` occurs 3 times in cat.py::Cat.age"),
    ],
)
def test_an_error_states_what_was_not_found_and_where(place: str, change: str, error: str):
    with pytest.raises(LookupError, match=error.replace(".", r"\.")):
        plant(Fault("a fault", "cat.py" + place, change, ""), CODE)
