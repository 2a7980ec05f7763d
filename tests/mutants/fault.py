"""A fault of `make mutants` (mutation testing), and the source code that has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple


class Fault(NamedTuple):
    """One edit of the code; `test` must fail with it.

    place: "file::function" or "file::Class.method"; "file" for the entire file.
    change: "old => new", each an expression or statements. `old` occurs exactly once in the place. Code is compared
        as syntax trees, so that its format, comments and the code around `old` don't matter.
    """

    name: str
    place: str
    change: str
    test: str

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]


def plant(fault: Fault, source: str) -> str:
    """The code of fault.file with the fault, without comments. source: the text of the file.

    Raises LookupError if the place does not exist, or if `old` does not occur exactly once in it.
    """
    tree = ast.parse(source)
    (parent, field, index), old, new = find(fault, tree)
    if index is None:
        setattr(parent, field, new[0])
    else:
        getattr(parent, field)[index : index + len(old)] = new
    return ast.unparse(tree)


def find(fault: Fault, tree: ast.AST) -> tuple[tuple[ast.AST, str, int | None], list[ast.AST], list[ast.AST]]:
    """Where the fault is planted in the tree of its file (parent, field, index), and its old and new nodes.

    Raises LookupError as `plant`.
    """
    old_text, new_text = fault.change.split(" => ")
    old, new = _nodes(old_text, new_text)
    definition = fault.place.removeprefix(fault.file).removeprefix("::")
    scopes = list(_definitions(tree, definition.split("."))) if definition else [tree]
    if not scopes:
        raise LookupError(f"{fault.name!r}: {fault.file} does not define {definition}; correct the place of the fault")
    found = [at for scope in scopes for at in _occurrences(scope, old)]
    if len(found) != 1:
        raise LookupError(
            f"{fault.name!r}: `{old_text}` occurs {len(found)} times in {fault.place}, but it must occur once; "
            "correct the place or the change of the fault"
        )
    return found[0], old, new


def _nodes(*texts: str) -> list[list[ast.AST]]:
    """The statements of each text, or its expression if each text is one expression."""
    bodies = [ast.parse(text).body for text in texts]
    expressions = [body[0].value for body in bodies if len(body) == 1 and isinstance(body[0], ast.Expr)]
    return [[e] for e in expressions] if len(expressions) == len(texts) else [[*body] for body in bodies]


def _definitions(scope: ast.AST, names: list[str]) -> Iterator[ast.AST]:
    """The functions and classes with this qualified name: several for a property with a setter."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _definitions(node, names)
        elif node.name == names[0]:
            yield from _definitions(node, names[1:]) if names[1:] else [node]


def _occurrences(scope: ast.AST, old: list[ast.AST]) -> Iterator[tuple[ast.AST, str, int | None]]:
    """(parent, field, index) of each occurrence. index: the position in a field that is a list, else None."""
    wanted = [ast.dump(node) for node in old]
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            nodes = value if isinstance(value, list) else [value]
            for i in range(len(nodes) - len(old) + 1):
                section = nodes[i : i + len(old)]
                if type(section[0]) is type(old[0]) and [ast.dump(node) for node in section] == wanted:
                    yield parent, field, i if nodes is value else None
