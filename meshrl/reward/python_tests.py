"""The reward kind `python_tests`: the program in a completion passes the tests of its row, in isolation.

A program can't read what is expected: outputs, and the values of `assert f(x) == value`, are compared in this process.
So ending with success, printing, and returning objects that equal everything do not help it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import secrets
import time
from typing import Any

from meshrl.core.errors import DataError
from meshrl.process.isolation import Isolation, Limits
from meshrl.reward.final_answer import answer_section

_BLOCK = re.compile(r"^```(?:python3?|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
TIMEOUT_S = 5.0

# Runs a program and then its tests. Reported values become plain ones, since classes may have any repr. The token shows
# that the last statement was reached.
_RUNNER = """
import json, os, sys, types

def plain(value):
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    kind = next((kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind)), None)
    return value if kind is None else {frozenset: set}.get(kind, kind)(map(plain, value))

def main():
    program, tests, token = json.loads(sys.stdin.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    values, module = [], types.ModuleType("program")
    sys.modules["program"] = module
    exec(compile(program, "program", "exec"), module.__dict__)
    space = {**module.__dict__, "_meshrl_report": lambda number, value: not values.append((number, plain(value)))}
    exec(compile(tests, "tests", "exec"), space)
    print(f"\\n{token}{values!r}", file=sys.__stdout__, flush=True)
    os._exit(0)

main()
"""


def python_tests(completion: str, answer: Any, *, sandbox: str = "bubblewrap", timeout_s: float = TIMEOUT_S) -> float:
    """1.0 when the program in the last block of code passes all tests, else 0.0. docs/data.md has the forms of tests.

    sandbox: a kind of process/isolation.py. timeout_s: of all tests of a completion.

    Raises: DataError for an answer without tests, ConfigError where programs can't be isolated.
    """
    isolation, deadline = _isolation(sandbox, timeout_s), time.monotonic() + timeout_s
    section = answer_section(completion)
    program = ([*_BLOCK.findall(section)] or [section])[-1]
    if not program.strip() or "\0" in program or len(program.encode(errors="replace")) > 100_000:
        return 0.0  # Linux allows 128 KiB in an argument
    pairs, tests, expected = tests_of(answer)
    for given, wanted in pairs:
        ended = isolation.run_python(program, max(0.0, deadline - time.monotonic()), given)
        if ended.fault or _lines(ended.output) != _lines(wanted):
            return 0.0
    if pairs:
        return 1.0
    token = secrets.token_hex(16)
    ended = isolation.run_python(_RUNNER, timeout_s, json.dumps([program, tests, token]))
    values = ended.output.rpartition(f"\n{token}")[2] if f"\n{token}" in ended.output and not ended.fault else ""
    try:
        right = {number if value == expected[number] else -1 for number, value in ast.literal_eval(values)}
    except (ValueError, TypeError, SyntaxError, LookupError, RecursionError, MemoryError):
        return 0.0
    return float(right == {*range(len(expected))})


def tests_of(answer: Any, place: str = "the answer") -> tuple[list[tuple[str, str]], str, list[Any]]:
    """The tests of a row: pairs (input, output), or statements and literals. In the statements each assert that a value
    equals a literal is `assert _meshrl_report(index of the literal, value)`. Raises: DataError for another answer."""
    if isinstance(answer, str):
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    with contextlib.suppress(KeyError, TypeError, ValueError, SyntaxError):
        if isinstance(answer, dict):
            pairs = list(zip(answer["inputs"], answer["outputs"], strict=True))
            if pairs and all(isinstance(text, str) for pair in pairs for text in pair):
                return pairs, "", []
        tree, expected = ast.parse(answer if isinstance(answer, str) else "\n".join(answer)), list[Any]()
        asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        for node in asserts:
            match node.test:
                case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
                    for literal, value in ((right, left), (left, right)):
                        with contextlib.suppress(ValueError, TypeError):
                            expected.append(ast.literal_eval(literal))
                            index = ast.Constant(len(expected) - 1)
                            node.test = ast.Call(ast.Name("_meshrl_report"), [index, value], [])
                            break
        if asserts:
            return [], ast.unparse(ast.fix_missing_locations(tree)), expected
    raise DataError(
        f"{place} {str(answer)[:80]!r} has no tests; it must be a dict with the lists of texts `inputs` and "
        "`outputs`, of equal length, or Python with assert statements, as a text or a list of texts"
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@functools.cache
def _isolation(sandbox: str, timeout_s: float) -> Isolation:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 1e6:
        raise ValueError(f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0")
    return Isolation(sandbox, "args.sandbox of a reward", Limits(wall_s=timeout_s, output_bytes=1 << 20))
