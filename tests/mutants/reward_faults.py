"""Faults of the graders: a right answer gets 0 or a wrong one gets 1, without an error."""

from __future__ import annotations

from fault import Fault

_REWARD = "tests/unit/reward/"
_STYLES = _REWARD + "test_math_answer_styles.py::"

REWARD_FAULTS = [
    Fault(
        "a failed grading counts as 0",
        "meshrl/reward/score.py",
        "            if isinstance(value, Failure):\n                return None",
        "            if isinstance(value, Failure):\n                continue",
        (_REWARD + "test_scorer.py::test_a_failed_grading_leaves_no_reward_and_is_counted",),
    ),
    Fault(
        "every failed grading gets the advice for a timeout",
        "meshrl/reward/score.py",
        "_ADVICE[kind] for kind in sorted({f.kind for _, _, f in failures})",
        '_ADVICE["timeout"] for _ in failures',
        (_REWARD + "test_scorer.py::test_the_error_for_failures_advises_by_their_kind",),
    ),
    Fault(
        "a Markdown heading counts as the answer mark",
        "meshrl/reward/final_answer.py",
        'marked = _MARKED_LINE.fullmatch(text.rstrip().rpartition("\\n")[2].strip())',
        'marked = re.search("#### ([0-9]+)", text)',
        (_STYLES + "test_the_default_rule_grades_the_answer_that_is_stated",),
    ),
    Fault(
        "the answer is read from the reasoning",
        "meshrl/reward/final_answer.py",
        'completion.rpartition("</think>")[2]',
        "completion",
        (_STYLES + "test_the_rule_math_verify_reads_the_same_styles",),
    ),
    Fault(
        "a number in prose is read without the formula around it",
        "meshrl/reward/plain_text.py",
        "    if _is_formula(listed):\n        return listed\n",
        "    if _is_formula(listed) and (number := re.search(_NUMBER, listed)):\n        return number[0]\n",
        (_STYLES + "test_the_default_rule_grades_the_answer_that_is_stated",),
    ),
    Fault(
        "a limit in prose is read as the value",
        "meshrl/reward/plain_text.py",
        "if _LIMIT.search(statement[:start]):",
        "if False:",
        (_STYLES + "test_the_default_rule_grades_the_answer_that_is_stated",),
    ),
    Fault(
        "the last number of an unparsable box counts as its value",
        "meshrl/reward/math_answer.py",
        "in_box if box_contents(text) else anywhere",
        "anywhere",
        (_STYLES + "test_the_default_rule_grades_the_answer_that_is_stated",),
    ),
    Fault(
        "a chain of carets is parsed",
        "meshrl/reward/expression_size.py",
        " or _SLOW_RUN.search(text)",
        "",
        (_REWARD + "test_expression_size.py::test_a_too_large_expression_is_wrong_unless_it_equals_the_reference",),
    ),
    Fault(
        "numbers below 1e-6 are all equal",
        "meshrl/reward/math_answer.py",
        "decimals += max(0, -1 - number.adjusted())",
        "decimals += 0",
        (_STYLES + "test_the_rule_math_verify_reads_the_same_styles",),
    ),
    Fault(
        "a power tower is evaluated",
        "meshrl/reward/expression_size.py",
        "return max(sizes[0] * _value(sizes[1]), largest)",
        "return largest",
        (_REWARD + "test_expression_size.py::test_a_too_large_expression_is_wrong_unless_it_equals_the_reference",),
    ),
    Fault(
        "an answer that exceeds the CPU time counts as a failed grading",
        "meshrl/reward/worker.py",
        "cpu_limited=list(cpu_limits)",
        "cpu_limited=[]",
        (
            _REWARD
            + "test_scorer.py::test_an_answer_that_math_answer_can_not_evaluate_in_its_cpu_time_is_wrong_and_counted",
        ),
    ),
]
