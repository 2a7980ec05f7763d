"""The reward `python_tests`: right programs pass, and a program that only looks right does not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from isolation_cases import ATTACKS, Attack
from test_self_test import rows, try_terms

from meshrl.config.reward import RewardConfig, RewardTerm
from meshrl.core.errors import ConfigError, DataError
from meshrl.reward.kinds import make_grader
from meshrl.reward.python_tests import python_tests
from meshrl.reward.self_test import try_references

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
PAIRS = {"inputs": ["3\n", "4"], "outputs": ["9", "16\n"]}
EQUAL = ["assert f(3) == 9", "assert (2, {'a': 4}) == g(2), 'g'"]
CLOSE = "import math\nfor x in (1, 0.5):\n    assert math.isclose(f(x), x * x)"
F = "def f(x):\n    return x * x\n"
BOTH = F + "from collections import Counter, namedtuple\ndef g(x):\n"
BOTH += "    return namedtuple('P', 'x y')(x, Counter(a=f(x)))\n"


def score(program: str, tests: Any, sandbox: str = "none", timeout_s: float = 20.0) -> float:
    completion = (
        f"<think>\n```python\n1 / 0\n```\n</think>First:\n```\nno\n```\nThen:\n```python\n{program}\n```\nDone."
    )
    return python_tests(completion, tests, sandbox=sandbox, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(int(input()) ** 2, end=' \\n\\n')", PAIRS),
        ("n = int(open(0).read())\nprint(n * n)", json.dumps(PAIRS)),
        ("import sys\nprint('log', file=sys.stderr)\nprint(int(input()) ** 2)", PAIRS),
        (BOTH, EQUAL),
        (BOTH + "print('log')\nif __name__ == '__main__':\n    print(input())", json.dumps(EQUAL)),
        (F, CLOSE),
        (F, "def check(h):\n    for x in range(3):\n        assert h(x) == h(x)\n    assert h(5) == 25\ncheck(f)"),
        ("def f(x):\n    return None", "assert f(1) is None"),
    ],
)
def test_a_right_program_passes(program: str, tests: Any):
    assert score(program, tests) == 1.0


EVERYTHING = "class E(float):\n    __eq__ = __ne__ = lambda self, other: True\n    __hash__ = None\n"


@pytest.mark.parametrize(
    "program",
    [
        "",
        "x = ",
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "def f(x):\n    import os\n    os._exit(0)\ng = f",
        "print(9)\nprint(16)",
        "def f(x):\n    print('passed', 9, 'ok', flush=True)\n    raise SystemExit\ng = f",
        EVERYTHING + "    __repr__ = lambda self: 'True'\ndef f(x):\n    return E(x)\ng = f",
        EVERYTHING + "def f(x):\n    return E(x)\ng = f",
        "import builtins\nbuiltins.repr = builtins.print = lambda *args, **kw: '9'\ndef f(x):\n    return 9\ng = f",
        "import sys, io\nsys.__stdout__ = sys.stdout = io.StringIO()\ndef f(x):\n    return x\ng = f",
        BOTH.replace("return x * x", "return x * x if x != 2 else 5"),  # one test of two
        BOTH.replace("return x * x", "return str(x * x)"),
        # what the runner sends is known to a program that searches for it, the expected values are not
        "import sys\nv = sys._getframe(1).f_locals\nprint('\\n' + v['token'] + '[(0, 10), (1, 0)]', flush=True)\n"
        "import os\nos._exit(0)",
        "def f(x):\n    import sys\n    return [9] if 'expected' in str(sys._getframe(2).f_locals) else 0\ng = f",
        "import os\nt = os.read(0, 99)\nos.lseek(0, 0, 0)\nprint(9 if b'9' in os.read(0, 9999) + t else 8)\n",
        "import time\ntime.sleep(60)",
        "while True:\n    pass",
        "print('x' * (1 << 21))",
    ],
)
@pytest.mark.parametrize("tests", [PAIRS, EQUAL], ids=["pairs", "asserts"])
def test_a_program_that_is_not_right_fails(program: str, tests: Any):
    is_endless = "sleep" in program or "while" in program
    assert score(program, tests, timeout_s=0.5 if is_endless else 20.0) == 0.0


@pytest.mark.parametrize("program", ["import os\nos._exit(0)", "def f(x):\n    raise SystemExit(0)", "print('ok')"])
def test_a_program_that_ends_before_the_last_statement_of_the_tests_fails(program: str):
    assert score(program, CLOSE) == 0.0


@needs_bubblewrap
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "_"))
def test_a_program_does_no_harm(attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The output of an attack that ends is right only if it was in vain."""
    monkeypatch.setenv("API_KEY", "SECRET")
    (tmp_path / "file").write_text("a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = attack.text.replace("PORT", str(server.getsockname()[1])).replace("FOLDER", str(tmp_path))
        tests = {"inputs": [""], "outputs": [attack.printed]}
        wall_s = 1.0 if attack.fault.startswith("it was killed after 2") else 60.0
        assert score(text, tests, "bubblewrap", wall_s) == float(not attack.fault)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "answer",
    ["4", 4, None, [], {}, "x = 1", "assert f(", {"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": [1]}],
)
def test_an_answer_without_tests_is_refused_with_its_row_before_the_run(answer: Any):
    with pytest.raises(DataError, match="has no tests; it must be a dict with the lists of texts `inputs`"):
        score(F, answer)
    terms = {"code": RewardTerm(kind="python_tests")}
    with pytest.raises(DataError, match=r"reward\.terms\.code: the answer of row row-1, .* has no tests"):
        asyncio.run(try_references(None, terms, rows(EQUAL, answer), print))  # type: ignore[arg-type]


def test_programs_are_not_run_where_they_can_not_be_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for args, expected in (
        ({"timeout_s": 4}, "bwrap is not installed.*with `none`, programs have your rights"),
        ({"sandbox": "bubblewarp", "timeout_s": 4}, "is 'bubblewarp'; allowed: .*did you mean 'bubblewrap'"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be a number of seconds above 0"),
        ({"time": 3}, "no argument 'time'; allowed: sandbox, timeout_s"),
    ):
        with pytest.raises(ConfigError, match=expected):
            make_grader("code", "python_tests", args)


def test_the_workers_grade_known_programs_at_the_start():
    term = RewardTerm(kind="python_tests", args={"sandbox": "none"})
    assert try_terms({"code": term}) == []
    with pytest.raises(ConfigError, match=r"args\.timeout_s must be at most half of reward\.timeout_s, which is 9"):
        try_terms({"code": term}, timeout_s=9)
    assert RewardConfig().timeout_s >= 10
