"""Parts of a run are joined by constructors and arguments of calls, not by assigning fields of another object."""

import ast
from collections.abc import Iterator
from pathlib import Path

from source_tree import name_of, python_files, syntax

PLACES = ("meshrl/run", "meshrl/loops", "meshrl/cluster", "meshrl/api.py", "meshrl/cli.py")
STATES = {  # objects whose fields are state that this code owns -> what they are
    **dict.fromkeys(("job", "self._job", "batch"), "the state of a loop, which the loop's functions change"),
    **dict.fromkeys(("s", "update.samples[i]", "self.proof"), "what a loop has computed about its samples"),
    **dict.fromkeys(("trainer", "rollouts", "self._sender.report"), "what a sync has changed"),
    **dict.fromkeys(("rank", "self._ranks[rank]", "worker", "call", "state"), "records of the executor's connections"),
    **dict.fromkeys(("error", "sys", "args"), "of Python"),
}
JOINED = {  # the joins from outside that are left -> why
    "self.worker.spec": "the store's address is known when the only rank starts",
    "self.replacement.layout": "the ranks have to run before their layout is known",
    "engine.on_batch": "engines report to the rank that has built them",
    "recorder.measure": "the recorder of the process exists before its rank",
    "recorder.annotate": "while the profiler runs",
}


def assigned(path: Path) -> Iterator[tuple[str, str, int]]:
    """(object, field, line) of every assignment to a field of another object."""
    for node in ast.walk(syntax(path)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) != "self":
                    yield ast.unparse(each.value), each.attr, each.lineno


def files() -> list[Path]:
    return [path for path in python_files("meshrl") if name_of(path).startswith(PLACES)]


def test_parts_of_a_run_are_joined_by_constructors():
    found = [(f"{owner}.{field}", name_of(p), line) for p in files() for owner, field, line in assigned(p)]
    joins = [join for join in found if join[0].rpartition(".")[0] not in STATES]
    assert [join for join in joins if join[0] not in JOINED] == [], "pass it to the constructor, or to a call"
    assert len(JOINED) <= 5 and {join[0] for join in joins} == {*JOINED}


def test_the_rule_finds_each_kind_of_assignment(tmp_path: Path):
    path = tmp_path / "joined.py"
    path.write_text(
        "a.b = 1\na.c, self.d = 1, 2\nself.e.f = 3\na.g += 1\nwith x() as a.h: pass\na.i: int = 1\nself.j = 1"
    )
    found = {f"{owner}.{field}" for owner, field, _ in assigned(path)}
    assert found == {"a.b", "a.c", "self.e.f", "a.g", "a.h", "a.i"}
