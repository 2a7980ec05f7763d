"""The built-in rewards and advantages. An entry has all that other code knows about its kind: a new kind is a function
and one entry here.

Functions are named by dotted paths, as a user's are: the config is read before the packages with the functions are
imported, and reward workers read this file, so it imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardKind:
    """A built-in reward.

    function: of (completion, answer, **keywords), see reward/kinds.py. check: called as the function is, once, with an
    empty completion, before a run starts: it raises ValueError for wrong args, and imports the packages that grading
    needs, so that their import does not count in the time limit of a grading. self_test: of (scorer, name of the term,
    term, note), in reward/self_test.py. needs_answer: it compares a completion with the answer of its row, which each
    row must have. judges_form: it does not judge whether an answer is right. full_score: of an answer that is as it
    should be. text: for the docs. neutral_args: those that change no score.
    """

    function: str
    check: str
    self_test: str
    needs_answer: bool
    judges_form: bool
    full_score: float
    text: str
    neutral_args: frozenset[str]


REWARDS = {
    "math_answer": RewardKind(
        function="meshrl.reward.math_answer:math_answer",
        check="meshrl.reward.math_answer:check_args",
        self_test="meshrl.reward.self_test:try_math_answer",
        needs_answer=True,
        judges_form=False,
        full_score=1.0,
        text="1 for the right final answer, else 0",
        neutral_args=frozenset(),
    ),
    "python_tests": RewardKind(
        function="meshrl.reward.python_tests:python_tests",
        check="meshrl.reward.python_tests:python_tests",
        self_test="meshrl.reward.self_test:try_python_tests",
        needs_answer=True,
        judges_form=False,
        full_score=1.0,
        text="1 for a program that passes the tests of its row, else 0",
        neutral_args=frozenset(["sandbox"]),
    ),
    "format": RewardKind(
        function="meshrl.reward.kinds:format_match",
        check="meshrl.reward.kinds:format_match",
        self_test="meshrl.reward.self_test:try_format",
        needs_answer=False,
        judges_form=True,
        full_score=1.0,
        text="1 for a text that matches a regular expression, else 0",
        neutral_args=frozenset(),
    ),
    "overlong": RewardKind(
        function="meshrl.reward.kinds:overlong",
        check="meshrl.reward.kinds:overlong",
        self_test="meshrl.reward.self_test:try_overlong",
        needs_answer=False,
        judges_form=True,
        full_score=0.0,
        text="a penalty of at most 1 for a long answer",
        neutral_args=frozenset(),
    ),
    "judge": RewardKind(
        function="meshrl.reward.judge:judge",
        check="meshrl.reward.judge:check_args",
        self_test="meshrl.reward.self_test:try_judge",
        needs_answer=False,
        judges_form=False,
        full_score=1.0,
        text="0 to 1, the score of a model behind an OpenAI-compatible endpoint",
        neutral_args=frozenset(["url", "api_key_env", "max_tries", "max_parallel", "calibration", "min_agreement"]),
    ),
}
"""reward.terms.NAME.kind -> its entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageKind:
    """A built-in advantage.

    function: of (rewards of one group float64[G], eps), which returns one advantage for each reward: 0 where they are
    equal. by_turn: it is of (Group, eps), and returns advantages of tokens. divides_by_std: by that of the group, plus
    algo.advantage_eps. text: for the docs, r = reward of a sample.
    """

    function: str
    by_turn: bool
    divides_by_std: bool
    text: str


ADVANTAGES = {
    "grpo": AdvantageKind(
        function="meshrl.algo.advantages:grpo", by_turn=False, divides_by_std=True, text="(r - mean) / std"
    ),
    "dr_grpo": AdvantageKind(
        function="meshrl.algo.advantages:dr_grpo", by_turn=False, divides_by_std=False, text="r - mean"
    ),
    "rloo": AdvantageKind(
        function="meshrl.algo.advantages:rloo", by_turn=False, divides_by_std=False, text="r - mean of the others"
    ),
    "turn_rloo": AdvantageKind(
        function="meshrl.algo.advantages:turn_rloo",
        by_turn=True,
        divides_by_std=False,
        text="rloo for each turn, whose r leaves out the rewards of the turns before it",
    ),
}
"""algo.advantage -> its entry."""


def needs_answer(kind: str) -> bool:
    """Whether this kind, also if it is given as the dotted path of a built-in function, needs answers of the rows."""
    return any(each.needs_answer and kind in (name, each.function) for name, each in REWARDS.items())


def compares_groups(advantage: str) -> bool:
    """Whether this advantage compares the answers of a group. A user-defined one may not."""
    return advantage in ADVANTAGES


def described(kinds: Mapping[str, RewardKind] | Mapping[str, AdvantageKind]) -> str:
    """The names with their texts, for the docs."""
    return "; ".join(f"{name} = {kind.text}" for name, kind in kinds.items())
