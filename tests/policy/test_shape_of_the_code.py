"""Limits of size, and rules for names and places, that keep the code small. Exceptions are listed with the reason."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from order_of_files import LONGEST_FIRST
from source_tree import ROOT, name_of, python_files, syntax

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100
LONG_FILES: dict[str, str] = {}  # file -> why it may be longer
LONG_FUNCTIONS: dict[str, str] = {}  # "file:function" -> why it may be longer
SHORTER: dict[str, int] = {"examples/one_file_grpo.py": 300}  # file -> its own limit of lines

FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "manager", "managers"}
DEVICE_WORDS = re.compile(r"(?<![a-z])(cuda|npu|hip|xpu)(?![a-z])", re.IGNORECASE)
DEVICE_FILE = "meshrl/core/device.py"
DEVICE_EXCEPTIONS: dict[str, str] = {}  # file -> why it may name a device
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function of a file, decorators not counted."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def device_words(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(word, line) of identifiers and texts that name a device. Docstrings may name devices."""
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            words = [node.name, node.asname]
        elif isinstance(node, ast.ImportFrom):
            words = [node.module]
        elif isinstance(node, ast.Constant):
            words = [node.value] if id(node) not in prose else []
        else:
            words = [getattr(node, field, None) for field in ("id", "attr", "name", "arg")]
        for word in words:
            if isinstance(word, str) and DEVICE_WORDS.search(word):
                yield word, getattr(node, "lineno", 0)


@pytest.mark.parametrize("folder", ["meshrl", "tests", "scripts", "examples", "benchmarks"])
def test_files_and_functions_stay_within_their_limits(folder: str):
    faults = []
    for path in python_files(folder):
        name, lines = name_of(path), len(path.read_text(encoding="utf-8").splitlines())
        limit = SHORTER.get(name, MAX_FILE_LINES)
        if lines > limit and name not in LONG_FILES:
            faults.append(f"{name} has {lines} lines, the limit is {limit}: split it by topic")
        faults += [
            f"{name}:{function} has {length} lines, the limit is {MAX_FUNCTION_LINES}"
            for function, length in functions(path)
            if length > MAX_FUNCTION_LINES and f"{name}:{function}" not in LONG_FUNCTIONS
        ]
    assert faults == []


def test_no_exception_outlives_its_reason():
    for name, reason in LONG_FILES.items():
        assert reason and len((ROOT / name).read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES, name
    for name, reason in LONG_FUNCTIONS.items():
        path, _, function = name.partition(":")
        lengths = [length for found, length in functions(ROOT / path) if found == function]
        assert reason and max(lengths) > MAX_FUNCTION_LINES, name
    for name, reason in DEVICE_EXCEPTIONS.items():
        assert reason and list(device_words(syntax(ROOT / name))), name


def test_every_init_file_is_empty_except_the_packages_own_which_exports_the_python_api():
    """Every name is imported from one place; the names of the Python API have a short path."""
    filled = [p for p in python_files() if p.name == "__init__.py" and p.read_text().strip()]
    assert [name_of(p) for p in filled] == ["meshrl/__init__.py"]
    _docstring, *statements, names = syntax(filled[0]).body
    assert {node.module for node in statements if isinstance(node, ast.ImportFrom)} == {"meshrl", "meshrl.api"}
    assert len(statements) == 2 and ast.unparse(names).startswith("__all__ = ")


def test_no_file_or_folder_has_a_meaningless_name():
    names = {part for path in python_files() for part in path.relative_to(ROOT).with_suffix("").parts}
    assert {name for name in names if FORBIDDEN_NAMES.intersection(name.lower().split("_"))} == set()


def test_only_one_file_contains_the_names_of_accelerators():
    faults = []
    for path in python_files("meshrl"):
        name = name_of(path)
        if name != DEVICE_FILE and name not in DEVICE_EXCEPTIONS:
            faults += [f"{name}:{line}: {word!r}" for word, line in device_words(syntax(path))]
    assert faults == [], f"use a function of {DEVICE_FILE}"


def test_the_device_rule_finds_identifiers_and_texts_but_not_docstrings():
    def seen(code: str) -> list[str]:
        return [word for word, _ in device_words(ast.parse(code))]

    assert seen("torch.cuda.synchronize()") == ["cuda"]
    assert seen("x.to('cuda:0')") == ["cuda:0"]
    assert seen("use_npu = 1") == ["use_npu"]
    assert seen("def f(xpu): f(hip=1)") == ["xpu", "hip"]
    assert seen("import torch.cuda as c\nfrom torch.cuda import Stream") == ["torch.cuda", "torch.cuda"]
    assert seen("f'{kind}cuda'") == ["cuda"]
    assert seen("'''CUDA and CPU'''\nchip = 'ship'") == []


def test_no_comment_marks_unfinished_code():
    faults = []
    for path in python_files():
        if path.name == Path(__file__).name:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if UNFINISHED.search(line):
                faults.append(f"{name_of(path)}:{number}: {line.strip()}")
    assert faults == []


def test_classes_have_unique_names():
    files = defaultdict(list)
    for path in python_files("meshrl"):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(name_of(path))
    several = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert several == {}, "name each class after what only it is"


def test_test_files_have_unique_names():
    """pytest imports test files by base name, so two files with one name hide each other."""
    others = ("__init__.py", "conftest.py", "sitecustomize.py")
    names = [path.name for path in python_files("tests") if path.name not in others]
    assert {name for name in names if names.count(name) > 1} == set()
    assert [name_of(path) for path in python_files("tests") if path.name == "__init__.py"] == []


def test_every_file_that_the_map_of_promises_names_exists_and_every_folder_of_tests_is_named():
    named = re.findall(r"`([\w/]+(?:\.py)?)`", (ROOT / "tests" / "README.md").read_text(encoding="utf-8"))
    assert [name for name in named if "/" in name and not (ROOT / "tests" / name).exists()] == []
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders - {name.split("/")[0] for name in named} == {"cluster"}  # needs a cluster of several machines


def test_every_file_in_the_order_of_files_exists():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for group in LONGEST_FIRST for name in group if not any(f.startswith(name) for f in files)] == []


def test_no_folder_of_tests_is_left_out(pytestconfig):
    """pytest's default list of folders to skip contains `dist`, and tests/dist has the tests of equality."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert "dist" in folders
    assert [name for name in folders if any(fnmatch(name, pattern) for pattern in skipped)] == []


def test_every_data_file_of_the_package_is_in_the_wheel():
    """setuptools packages only Python files by itself."""
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = {f"{package.replace('.', '/')}/{name}" for package, names in shipped.items() for name in names}
    files = (path for path in (ROOT / "meshrl").rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc"))
    assert {name_of(path) for path in files} == listed


def test_each_package_has_a_line_budget():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `(\w+)` \| ([\d,]+) \| ([\d,]+) ", page)
    assert sorted(name for name, *_ in rows) == sorted(
        path.parent.name for path in (ROOT / "meshrl").glob("*/__init__.py")
    )
    assert all(int(first.replace(",", "")) <= int(most.replace(",", "")) for _, first, most in rows)


PAGES_ABOUT_THE_CODE = [
    *("README.md", "CONTRIBUTING.md", "docs/design.md", "docs/pages.md", "docs/protocols.md", "docs/perf/README.md")
]


@pytest.mark.parametrize("page", PAGES_ABOUT_THE_CODE)
def test_the_files_that_a_page_about_the_code_names_exist(page: str):
    named = re.findall(r"`(?!my/)((?:[\w.]+/)+\w+\.\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    places = (ROOT, ROOT / "meshrl", ROOT / "benchmarks")
    assert named and [name for name in named if not any((place / name).exists() for place in places)] == []


def test_each_error_of_meshrl_has_a_section_in_the_page_of_errors():
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)
    bases = re.compile(r"^class (\w+)\((?:MeshrlError|SyncError|EngineFailure)\):", re.MULTILINE)
    errors = {name for path in python_files("meshrl") for name in bases.findall(path.read_text(encoding="utf-8"))}
    assert len(errors) >= 18 and errors - {word for heading in headings for word in heading.split()} == set()
