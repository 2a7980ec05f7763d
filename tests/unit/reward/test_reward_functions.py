"""Reward functions that are Python objects are called in the same workers as functions that a config names."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
from test_scorer import make_trajectory

from meshrl.config.reward import RewardConfig, RewardTerm
from meshrl.core.errors import ConfigError, Failure
from meshrl.reward.sandbox import Sandbox
from meshrl.reward.score import Scorer

PAYLOAD = {
    "completion": "four",
    "answer": "4",
    "prompt": {"meta": {"base": 10.0}},
    "messages": [],
    "stop_reason": "stop",
    "num_tokens": 5,
}


def graded(*functions: Callable[..., Any], args: dict[str, Any] | None = None, timeout_s: float = 60.0) -> list[Any]:
    """The result of each function for PAYLOAD, all in one worker."""
    term = RewardTerm(kind="a_name:that_leads_nowhere", args=args or {})
    terms = {f"t{i}": term for i in range(len(functions))}

    async def run() -> list[Any]:
        objects = dict(zip(terms, functions))
        sandbox = Sandbox(RewardConfig(terms=terms, timeout_s=timeout_s, max_memory_bytes=512 << 20), objects)
        try:
            return await sandbox.grade([(term, PAYLOAD) for term in terms])
        finally:
            await sandbox.close()

    return asyncio.run(run())


class Judge:
    def __init__(self, bonus: float):
        self.bonus = bonus

    def __call__(self, completion: str, answer: Any) -> float:
        return self.bonus + len(completion)


def defined_in_main() -> Callable[..., Any]:
    """A function as in a notebook or a script: of a module `__main__` that no worker has."""
    main = types.ModuleType("__main__")
    code = (
        "import math\nBONUS = 3.0\n"
        "def twice(x):\n    return 2 * x\n"
        "def score(completion, answer, prompt=None):\n"
        "    return twice(math.floor(BONUS)) + prompt['meta']['base'] + float(answer)\n"
    )
    exec(code, vars(main))
    return main.score


def test_functions_that_no_worker_could_import_are_sent_by_value():
    bonus = 0.5
    functions = (lambda completion, answer: bonus + len(completion), defined_in_main(), Judge(1.0))
    assert graded(*functions) == [4.5, 20.0, 5.0]


def test_keyword_arguments_async_functions_and_partials_work_as_by_name():
    async def slow(completion, answer, *, factor, num_tokens):
        await asyncio.sleep(0)
        return factor * num_tokens

    def scaled(completion, answer, *, factor, offset=0.0):
        return offset + factor * float(answer)

    partial = functools.partial(scaled, offset=1.0)
    assert graded(slow, scaled, partial, args={"factor": 2.0}) == [10.0, 8.0, 9.0]


def test_a_function_that_hangs_is_killed_and_one_that_raises_is_a_counted_failure():
    def hang(completion, answer):
        while True:
            time.sleep(1)

    def crash(completion, answer):
        raise KeyError(completion)

    hung, crashed = graded(hang, crash, timeout_s=1.0)
    assert isinstance(hung, Failure) and hung.kind == "timeout"
    assert isinstance(crashed, Failure) and crashed.kind == "crash" and "KeyError: 'four'" in crashed.message


def test_a_function_that_uses_an_object_that_can_not_be_sent_is_refused_with_its_term():
    lock = threading.Lock()

    def locked(completion, answer):
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"reward\.terms\.t0: the function can't be sent .*TypeError.*lock"):
        graded(locked)


def test_a_function_of_a_module_that_no_worker_finds_is_refused_with_its_term(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("made_here_alone")
    exec("def score(completion, answer):\n    return 1.0\n", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.score.__module__ = module.__name__
    with pytest.raises(ConfigError, match=r"reward\.terms\.t0: .* can't be loaded in a worker .*made_here_alone"):
        graded(module.score)


def test_a_function_with_the_wrong_signature_is_refused_as_by_name():
    with pytest.raises(ConfigError, match=r"reward\.terms\.t0 .*no argument 'factor'"):
        graded(lambda completion, answer: 1.0, args={"factor": 2.0})


def test_a_scorer_grades_terms_by_name_and_by_object_side_by_side():
    terms = {"named": {"kind": "tiny_run:ascii_share"}, "given": {"kind": "tiny_run:missing", "weight": 2.0}}
    trajectory = make_trajectory("four")

    async def score() -> None:
        scorer = Scorer(RewardConfig.model_validate({"terms": terms}), {"given": lambda completion, answer: 0.25})
        try:
            await scorer.score([trajectory])
        finally:
            await scorer.close()

    asyncio.run(score())
    assert trajectory.rewards == {"named": 1.0, "given": 0.25} and trajectory.reward == 1.5
