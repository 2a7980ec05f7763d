"""Each rule of math_answer on answers with a known result."""

import pytest

from meshrl.core.errors import ConfigError
from meshrl.reward.kinds import format_match, make_grader, overlong
from meshrl.reward.math_answer import math_answer


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("48 / 2 = 24\n#### 72", "72", 1),
        ("#### 72", "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", 1),
        ("#### 1,234", "1234", 1),
        ("#### 1234", "#### 1,234", 1),
        ("#### $18", "18", 1),
        ("#### 18.", "18", 1),
        ("#### -5", "-5", 1),
        ("#### -$5", "-5", 1),
        *((f"#### 5{more}", "5", 0) for more in ("-6", " + 6", "–6", " 1/2", "**2", "±1", "√2", ", 6", " million")),
        ("#### 18.0", "18", 0),  # the benchmark compares strings
        ("#### 7\nNo: #### 72", "72", 1),  # the last one counts
        ("#### 72\nNo: #### 7", "72", 0),
        ("The answer is 72", "72", 0),
        ("####72", "72", 0),  # the mark ends in a space
        ("#### .", "72", 0),
        ("####", "72", 0),
        ("", "72", 0),
    ],
)
def test_gsm8k_rule(completion, answer, right):
    assert math_answer(completion, answer, rule="gsm8k") == right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (" 12 \n", "12", 1),
        ("12", 12, 1),
        ("12", 12.0, 1),
        ("1,000", "1000.00", 1),
        ("1,00", "100", 0),  # not how thousands are written
        ("0.30000000000000001", "0.3", 0),  # decimal, not float
        ("-0", "0", 1),
        ("5.", "5", 1),
        (".5", "0.5", 1),
        ("1/2", "0.5", 0),
        ("Paris", "Paris ", 1),
        ("paris", "Paris", 0),
        ("12 ", "13", 0),
        ("the answer is 12", "12", 0),
        ("nan", "nan.", 0),
        ("", "0", 0),
    ],
)
def test_exact_rule(completion, answer, right):
    assert math_answer(completion, answer, rule="exact") == right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "1/2", 1),
        ("so it is \\boxed{0.5}", "\\frac{1}{2}", 1),
        ("so $x = \\frac{2}{4}$", "$\\frac{1}{2}$", 1),
        ("\\boxed{(1, 3)}", "(1,3)", 1),
        ("\\boxed{x+1}", "1+x", 1),
        ("\\boxed{5}", "4", 0),
        ("I do not know", "4", 0),
        ("\\boxed{\\frac{1}{}", "4", 0),
        ("", "4", 0),
    ],
)
def test_math_verify_rule(completion, answer, right):
    assert math_answer(completion, answer, rule="math_verify") == right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("24 + 48 = 72\n#### 72", "... #### 72", 1),  # the mark
        ("#### 72.0", "72", 1),  # a number, where gsm8k compares strings
        ("so \\boxed{72}", "... #### 72", 1),  # no mark: math-verify against the solution's number
        ("72", "... #### 72", 1),
        ("72.0", "72", 1),  # plain numbers
        ("71", "72", 0),
        ("the total is 72", "72", 1),
        ("#### \\frac{1}{2}", "\\frac{1}{2}", 1),  # not a GSM8K reference
        ("Paris", "Paris", 1),
    ],
)
def test_auto_rule_goes_by_the_form_of_the_completion(completion, answer, right):
    assert math_answer(completion, answer) == right


@pytest.mark.parametrize(("rule", "answer"), [("gsm8k", "seventy"), ("gsm8k", ""), ("math_verify", "\\boxed{}")])
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
