"""The repository's Python files and their syntax trees, for the tests of this folder."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("meshrl", "tests", "scripts", "examples", "benchmarks")


def python_files(*folders: str) -> list[Path]:
    """All Python files below these folders of the repository; by default below all folders with code."""
    return sorted(path for folder in folders or FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """The path from the repository's root."""
    return path.relative_to(ROOT).as_posix()


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of a file, including imports in functions and under TYPE_CHECKING."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import; write the full name"
            assert node.module is not None
            if node.module == "meshrl":
                yield from ((f"meshrl.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno
        elif isinstance(node, ast.Call) and _imports_by_call(node):
            yield node.args[0].value, node.lineno  # type: ignore[attr-defined]


def _imports_by_call(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    is_text = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return is_text and name in ("import_module", "__import__")
