"""Answers that are no expressions, units, typography and the types of a reference: what math_answer states of each."""

import pytest
from answers_by_form import FORMS

from meshrl.reward.answer_forms import references
from meshrl.reward.math_answer import math_answer

PAIRS = [
    pytest.param(completion, reference, right, id=f"{kind}: {completion!r} {'is' if right else 'is not'} {reference!r}")
    for kind, rows in FORMS.items()
    for completion, stated, others in rows
    for right, answers in ((True, stated), (False, others))
    for reference in answers
]


@pytest.mark.parametrize(("completion", "reference", "right"), PAIRS)
def test_the_default_rule_grades_answers_of_every_form(completion, reference, right):
    assert math_answer(completion, reference) == right


@pytest.mark.parametrize(
    ("completion", "reference", "right"),
    [
        *(("#### 72", 72.0, 1), ("#### 72", "72.0", 1), ("#### 72.5", 72.5, 1), ("#### 7.2", 72.0, 0)),
        *(("#### 1/2", "1", 0), ("#### 5 or 6", "5", 0), ("#### 5e3", "5", 0), ("#### 5 apples", "5", 1)),
        *(("#### 4", {"target": ["4"]}, 1), ("#### 4", ["3", "4"], 1), ("#### 4", ["3", "5"], 0)),
    ],
)
def test_gsm8k_reads_numbers_only_and_references_of_all_types(completion, reference, right):
    assert math_answer(completion, reference, rule="gsm8k") == right


@pytest.mark.parametrize("answer", [None, [], {}, float("nan"), {"a": 1, "b": 2}, {"target": [None]}])
def test_a_reference_without_a_value_is_an_error(answer):
    with pytest.raises(ValueError, match="is no answer; allowed: a text"):
        references(answer)


@pytest.mark.parametrize("reference", ["So half.\n#### 1/2", "#### true"])
def test_gsm8k_refuses_a_solution_whose_mark_is_followed_by_no_number(reference):
    with pytest.raises(ValueError, match="neither a number"):
        math_answer("#### 1", reference, rule="gsm8k")


@pytest.mark.parametrize("unit", ["\\text{", "\\,", "0.", "1:", "(A) ", "March 5 ", "~", "a b "])
def test_long_answers_of_one_form_take_linear_time(unit):
    assert math_answer(f"\\boxed{{{unit * 5_000}}}", "7") == 0
    assert math_answer(unit * 5_000, "7") == 0
