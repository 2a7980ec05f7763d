"""The faults of `make mutants` match the code. Testing them takes minutes and is a separate command."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_code_of_a_fault_occurs_once_and_the_edited_file_is_valid_python(fault: Fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1 and fault.old != fault.new
    ast.parse(text.replace(fault.old, fault.new))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_tests_that_catch_a_fault_exist(fault: Fault):
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        functions = {
            node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name.partition("[")[0] in functions, test


def test_the_names_of_faults_are_unique():
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 25
