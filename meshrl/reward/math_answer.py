"""The reward for the right final answer: 1.0 or 0.0, by one of four rules.

| rule | part of the completion that is read | right if |
| --- | --- | --- |
| gsm8k | its last `#### N` | N is the same string as in the reference, without commas, $ and a trailing period |
| exact | all of it | stripped texts are equal, or both are plain numbers of equal value (1.5e3 = 1,500) |
| math_verify | the last boxed, LaTeX or plain expression | mathematically equal (1/2 = 0.5 = \\frac{1}{2}) |
| auto | the text after `####` in its last line; without this mark, all of it | right by exact or by math_verify |

auto and math_verify ignore all text before `</think>`, and read the last <answer> element if there is one. A
completion without a readable answer is wrong (0.0). A reference that can't be read is an error, not a wrong answer.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from meshrl.reward.answer_forms import equal_by_form, references
from meshrl.reward.final_answer import (
    answer_section,
    box_contents,
    expression_of,
    final_expression,
    marked_answer,
    normalized,
    stated_text,
)

_GSM8K_NUMBER = re.compile(
    r"\$?-?\$?[0-9.,]++(?!\s*[-+/^:×*–±√]\s*[0-9\\(*]|\s+[0-9]+/[0-9]|(?<=,)\s+[0-9]|\s+(?:thousand|million|billion)\b"
    r"|[eE][-+]?[0-9]|\s+(?:or|and|to)\s+\$?-?[0-9])"
)
_MARKED = re.compile(f"#### ({_GSM8K_NUMBER.pattern})")
_PLAIN_NUMBER = re.compile(
    r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?"
)
_E_NOTATION = re.compile(r"(?<![\w.\\])[0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]{1,2}(?![\w^])")
_MULTIPLE_OF_E = re.compile(r"[0-9]\s*e")  # in the reference; e in the answer 2e-3 is then Euler's number, too
_ALTERNATIVE = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])")


def math_answer(completion: str, answer: Any, *, rule: str = "auto") -> float:
    """1.0 when the completion's final answer equals the reference under `rule` (see the table above), else 0.0.

    answer: the reference: a number, a text, LaTeX, a complete GSM8K solution that ends in `#### N`, or one of the
    collections that meshrl.reward.answer_forms.references reads, of which each element is right.
    Raises: ValueError for an unknown rule or a reference that the rule can't read.
    """
    is_right = _rule(rule)
    return float(any([is_right(completion, reference) for reference in references(answer)]))


def check_args(completion: str, answer: Any, *, rule: str = "auto") -> None:
    """Refuse an unknown rule, and import math-verify if the rule may need it: the import takes half a second."""
    _rule(rule)
    if rule in ("auto", "math_verify"):
        import math_verify  # noqa: F401

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warning is that its own time limit is off


def gsm8k(completion: str, answer: str) -> bool:
    """The rule of the GSM8K benchmark: compare the numbers after `#### `, as strings without commas.

    Two additions, as in public evaluations: the last `####` counts (the first one, as in the benchmark's own script,
    rewards a model for guessing several times), and a $ or a trailing period is ignored.
    Source: github.com/openai/grade-school-math, dataset.py; lm-evaluation-harness, tasks/gsm8k (ignored characters).
    """
    marked = _MARKED.findall(completion)
    number, reference = _cleaned(marked[-1]) if marked else "", _gsm8k_reference(answer)
    return number == reference or ("." in reference and exact(number, reference))


def exact(completion: str, answer: str) -> bool:
    """Equal stripped texts, or plain numbers of equal value: 1,000 = 1000.0, but 1/2 is not 0.5."""
    completion, answer = completion.strip(), answer.strip()
    if completion == answer:
        return True
    got, want = _plain_number(completion), _plain_number(answer)
    return got is not None and got == want


def math_verify(completion: str, answer: str) -> bool:
    """Equality by the math-verify package: fractions, roots, sets, intervals, equations, percentages.

    Its own timeouts are off: they use SIGALRM, which can't end a hang in C; the worker's limit of CPU time can.
    Expressions that it can't parse or compare, also for lack of memory, are unequal. Floats are compared to six
    decimals, and to six significant digits if the reference is a number below 0.1.

    Source: github.com/huggingface/Math-Verify.
    """
    section = answer_section(completion)
    by_form = equal_by_form(normalized(stated_text(section)), normalized(answer), math_verify)
    if by_form is not None:
        return by_form
    reference, text = expression_of(answer), final_expression(section)
    if _plain_number(reference) is not None or not _MULTIPLE_OF_E.search(reference):
        reference, text = _with_decimals(reference), _with_decimals(text)
    return _equal(_math_reference(reference), _parsed(text))


def auto(completion: str, answer: str) -> bool:
    """Choose the rule by the completion's form. Of a GSM8K solution as reference, only its answer is used."""
    reference = normalized(answer.rpartition("####")[2].strip().partition("\n")[0])
    if not reference:
        raise ValueError(f"the reference {answer[-80:]!r} states no answer after its last '####'")
    section = answer_section(completion)
    stated = normalized(marked_answer(section) or section)
    number = stated.lstrip("$").rstrip("$. ")
    if _plain_number(number) is not None and _plain_number(reference) is not None:
        return exact(number, reference)
    return math_verify(stated, reference)


def _rule(name: str) -> Callable[[str, str], bool]:
    if name not in RULES:
        raise ValueError(f"rule is {name!r}; allowed: {', '.join(RULES)}")
    return RULES[name]


def _cleaned(number: str) -> str:
    return number.replace(",", "").replace("$", "").rstrip(".")


def _gsm8k_reference(answer: str) -> str:
    marked = _MARKED.findall(answer)
    text = marked[-1] if marked else answer.strip()
    if not _GSM8K_NUMBER.fullmatch(text):
        raise ValueError(f"the reference {answer[-80:]!r} is neither a number nor a solution that ends in '#### N'")
    return _cleaned(text)


def _plain_number(text: str) -> Decimal | None:
    text = text.strip().replace("\u2212", "-")
    return Decimal(text.replace(",", "")) if _PLAIN_NUMBER.fullmatch(text) else None


def _with_decimals(text: str) -> str:
    """`text` with 1500 in place of 1.5e3, which math-verify would read as a product with Euler's number."""
    return _E_NOTATION.sub(lambda m: format(Decimal(m[0]), "f"), text)


@functools.lru_cache(maxsize=1024)  # a group's attempts share their reference
def _math_reference(answer: str) -> list[Any]:
    text = answer
    if not any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\[")):
        text = f"\\boxed{{{answer}}}"
    parsed = _parsed(text)
    if not parsed:
        raise ValueError(f"math-verify finds no expression in the reference {answer[:80]!r}")
    return parsed


def _parsed(text: str) -> list[Any]:
    """The expressions that math-verify reads, then their text; only the text if they are too large to evaluate."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    from meshrl.reward.expression_size import MAX_DIGITS, can_be_parsed, num_digits

    if not can_be_parsed(text):
        return [", ".join(content for _, _, content in box_contents(text)) or text]
    text = _ALTERNATIVE.sub(", ", text)
    in_box = [LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)]
    anywhere = [LatexExtractionConfig(), ExprExtractionConfig()]
    # In boxes no plain numbers are searched: the last number of a box that can't be parsed is not its value.
    parsed = parse(text, extraction_config=in_box if box_contents(text) else anywhere, parsing_timeout=None)
    return [
        expression
        for expression in parsed
        if isinstance(expression, str) or (num_digits(expression) <= MAX_DIGITS and not _is_false_equation(expression))
    ]


def _equal(want: list[Any], got: list[Any]) -> bool:
    """math-verify's verdict, and for numbers a relative comparison where its absolute one fails: it takes differences
    below 1e-15 for 0, and compares a large float with an integer digit by digit."""
    from math_verify import verify
    from sympy import Float

    wanted, number = _evaluated(want), _evaluated(got)
    size = 1.0 if wanted is None else abs(wanted)
    decimals = 6 + (max(0, -1 - math.floor(math.log10(size))) if size > 1e-300 else 0)  # 6: so that 0.333333 = 1/3
    is_equal = verify(want, got, float_rounding=decimals, timeout_seconds=None)
    if number is None or wanted is None or 1e-9 < size < 1e9:
        return is_equal
    if size < 1:
        return is_equal and bool(abs(number - wanted) <= 1e-5 * size + 1e-300)
    has_float = any(expressions[0].has(Float) for expressions in (want, got))
    return is_equal or (has_float and bool(abs(number - wanted) <= 1e-14 * size))


def _evaluated(expressions: list[Any]) -> Any:
    """The value of the first expression as a float of 30 digits; None if it is no finite real number."""
    is_number = expressions and getattr(expressions[0], "is_number", False) and expressions[0].is_comparable
    return expressions[0].doit().evalf(30) if is_number and expressions[0].is_finite else None


def _is_false_equation(expression: Any) -> bool:
    """Whether both sides are numbers that differ by more than rounding. math-verify would use only the right side."""
    if not getattr(expression, "is_Equality", False) or not expression.lhs.is_number or not expression.rhs.is_number:
        return False
    return bool(abs((expression.lhs - expression.rhs).evalf()) > 0.02 * abs(expression.rhs.evalf()))


RULES: dict[str, Callable[[str, str], bool]] = {
    "auto": auto,
    "gsm8k": gsm8k,
    "exact": exact,
    "math_verify": math_verify,
}
"""rule -> function of (completion, reference)."""
