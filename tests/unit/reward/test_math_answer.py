"""Rules that grade right answers 0 or wrong ones 1. Users would hardly notice such a rule: the rewards still rise.

labelled_answers.jsonl has answers in the styles that models write, labelled by hand: rule, what is tried, completion,
references that it states, others that it does not state.
"""

import json
from pathlib import Path

import pytest

from meshrl.core.errors import ConfigError
from meshrl.reward.answer_forms import references
from meshrl.reward.kinds import format_match, make_grader, overlong
from meshrl.reward.math_answer import math_answer

LABELLED = Path(__file__).with_name("labelled_answers.jsonl").read_text(encoding="utf-8").splitlines()
CASES = [
    pytest.param(rule, completion, reference, right, id=f"{rule}, {kind}: {'' if right else 'not '}{reference!r}")
    for rule, kind, completion, stated, others in map(json.loads, LABELLED)
    for right, answers in ((1.0, stated), (0.0, others))
    for reference in answers
]


@pytest.mark.parametrize(("rule", "completion", "reference", "right"), CASES)
def test_a_rule_grades_the_answer_that_is_stated(rule, completion, reference, right):
    assert math_answer(completion, reference, rule=rule) == right


@pytest.mark.parametrize("answer", [None, [], {}, float("nan"), {"a": 1, "b": 2}, {"target": [None]}])
def test_a_reference_without_a_value_is_an_error(answer):
    with pytest.raises(ValueError, match="is no answer; allowed: a text"):
        references(answer)


@pytest.mark.parametrize("unit", ["\\text{", "\\,", "0.", "1:", "(A) ", "March 5 ", "~", "a b "])
def test_long_answers_of_one_form_take_linear_time(unit):
    assert math_answer(f"\\boxed{{{unit * 5_000}}}", "7") == 0
    assert math_answer(unit * 5_000, "7") == 0


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        *(("gsm8k", answer) for answer in ("seventy", "", "So half.\n#### 1/2", "#### true")),
        ("math_verify", "\\boxed{}"),
    ],
)
def test_a_reference_that_can_not_be_read_is_an_error_not_a_wrong_answer(rule, answer):
    with pytest.raises(ValueError, match="reference"):
        math_answer("#### 1", answer, rule=rule)


@pytest.mark.parametrize(
    ("completion", "args", "right"),
    [
        ("<think>a\nb</think> 4\n", {"regex": "(?s)<think>.*</think> [0-9]+"}, 1),
        ("<think>a\nb</think> 4", {"regex": "<think>.*</think> [0-9]+"}, 0),
        ("well: 4", {"regex": "[0-9]"}, 0),
        ("4, well", {"regex": "[0-9]"}, 0),
        ("well: 4", {"regex": "[0-9]", "where": "anywhere"}, 1),
    ],
)
def test_format_match(completion, args, right):
    assert format_match(completion, None, **args) == right


def test_overlong_falls_from_0_to_minus_1_over_the_last_tokens():
    """100 tokens, of which the last 20 are the buffer."""
    scores = {n: overlong("", None, num_tokens=n, max_tokens=100, buffer_tokens=20) for n in (0, 80, 81, 90, 100, 300)}
    assert scores == {0: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 100: -1.0, 300: -1.0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_tokens": 10, "buffer_tokens": 20}, "buffer_tokens is 20; it must be at most max_tokens = 10"),
        ({"max_tokens": 10, "buffer_tokens": 0}, "buffer_tokens is 0; it must be an integer from 1 to 1048576"),
        ({"max_tokens": 0.5, "buffer_tokens": 1}, "max_tokens is 0.5; it must be an integer from 1 to 1048576"),
        ({"max_tokens": 1 << 40, "buffer_tokens": 1}, "max_tokens is 1099511627776; it must be an integer from 1 to"),
        ({"max_tokens": 10}, "missing a required argument: 'buffer_tokens'"),
        ({"max_tokens": 10, "buffer": 1}, "no argument 'buffer'.*did you mean 'buffer_tokens'"),
    ],
)
def test_wrong_arguments_of_overlong_are_refused_before_a_run(args, message):
    with pytest.raises(ConfigError, match=message):
        make_grader("long", "overlong", args)
