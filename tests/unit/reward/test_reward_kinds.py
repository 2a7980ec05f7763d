"""P30: a reward entry of the config that can't work is refused with the reason, before anything is graded."""

import pytest

from meshrl.core.errors import ConfigError
from meshrl.reward.kinds import CHECKS, REWARDS, make_grader
from meshrl.reward.math_answer import math_answer


def test_names_and_dotted_paths_resolve_to_functions():
    for kind in ("math_answer", "meshrl.reward.math_answer:math_answer"):
        assert make_grader("t", kind, {}).function is math_answer


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("math_anser", {}, "allowed: math_answer, format, or a dotted path package.module:name; did you mean"),
        ("no_such_module:score", {}, "importing 'no_such_module' raised ModuleNotFoundError"),
        ("sandbox_graders:behav", {}, "has no 'behav'; did you mean 'behave'"),
        ("sandbox_graders:no_function", {}, "7 is not a callable object"),
        ("sandbox_graders:no_arguments", {}, "too many positional arguments"),
        ("sandbox_graders:swapped", {}, "completion and the answer, in this order"),
        ("math_answer", {"rul": "exact"}, "no argument 'rul'; allowed: rule; did you mean 'rule'"),
        ("math_answer", {"rule": "exakt"}, "rule is 'exakt'; allowed: auto, gsm8k, exact, math_verify"),
        ("format", {}, "missing a required argument: 'regex'"),
        ("format", {"regex": "(["}, "is not valid"),
        ("format", {"regex": "x", "where": "start"}, "where is 'start'; allowed: full, anywhere"),
    ],
)
def test_an_entry_that_can_not_work_is_refused(kind, args, message):
    with pytest.raises(ConfigError) as refused:
        make_grader("judge", kind, args)
    assert message in str(refused.value)


def test_a_function_gets_only_the_keywords_in_its_signature():
    assert make_grader("t", "sandbox_graders:behave", {}).takes == ()
    assert make_grader("t", "sandbox_graders:offered", {}).takes == ("prompt", "num_tokens")
    assert len(make_grader("t", "sandbox_graders:everything", {}).takes) == 4
    assert make_grader("t", "sandbox_graders:offered", {"num_tokens": 7}).takes == ("prompt",)


def test_async_functions_and_objects_are_known_as_such():
    assert make_grader("t", "sandbox_graders:slow", {}).is_async
    assert make_grader("t", "sandbox_graders:judge", {}).is_async
    assert not make_grader("t", "sandbox_graders:behave", {}).is_async


def test_checks_are_for_kinds_that_exist():
    assert set(CHECKS) <= set(REWARDS)
