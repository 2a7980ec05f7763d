"""Estimates how large a mathematical expression becomes when it is evaluated, without evaluating it.

A few characters can need more memory than any computer has: 9^{9^{9^{9}}}, 9!!!!!!, \\binom{10^9}{5 \\cdot 10^8}.
"""

from __future__ import annotations

import math
import re
from typing import Any

from sympy import Add, Float, MatrixBase, Mul, Pow, Product, Rational, Sum, binomial, exp, factorial, gamma

from meshrl.reward.final_answer import box_contents, closing_brace

MAX_DIGITS = 10_000
"""Limit of decimal digits of a number, and of terms of a sum or product; a larger answer is not evaluated."""
MAX_EXPRESSION_CHARS = 1_000
MAX_NESTED_BRACKETS = 10
"""Limit of the nesting depth of brackets; the time of the parser grows faster than linearly with the depth."""
MAX_ELEMENTS = 100
"""Limit of the commas in an answer; math-verify compares the elements of two lists in every order."""
_MAX_TREE_DEPTH = 100
_SLOW_RUN = re.compile(r"(?:\^[^\^]{0,2}){6}|(?:\|[^|]{0,2}){9}")  # x^x^x^..., ||||...; the parser backtracks
_DELIMITED = re.compile(r"\$[^$\n]+\$|\\\((?:(?!\\\)).)*|\\\[(?:(?!\\\]).)*", re.DOTALL)

_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{")
_LARGE_ARGUMENT = re.compile(r"[0-9]{6}|[0-9]\s*[\^!]")


def can_be_parsed(text: str) -> bool:
    """Whether math-verify parses `text` fast. Binomials are checked here, because parsing evaluates them."""
    boxes = [content for _, _, content in box_contents(text)]
    if any(len(content) > MAX_EXPRESSION_CHARS for content in boxes) or _SLOW_RUN.search(text):
        return False
    if any(expression.count(",") >= MAX_ELEMENTS for expression in boxes or _DELIMITED.findall(text)):
        return False
    for paragraph in text.split("\n\n"):  # text may contain unclosed brackets, which must not add up over paragraphs
        depth = 0
        for bracket in re.findall(r"[(\[{)\]}]", paragraph):
            depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
            if depth > MAX_NESTED_BRACKETS:
                return False
    for match in _BINOMIAL.finditer(text):
        middle = closing_brace(text, match.end())
        end = closing_brace(text, text.find("{", middle) + 1) if "{" in text[middle:] else len(text)
        if _LARGE_ARGUMENT.search(text, match.end(), end):
            return False
    return True


def num_digits(expression: Any, depth: int = 0) -> float:
    """An upper estimate of the digits before the decimal point of each number in the evaluation of `expression`.

    1/n counts as n. A symbol counts as 1, so that x^{2024} is small. A sum or product over a range counts as its number
    of terms. A sum of n fractions can have a denominator with n times as many digits.
    """
    if depth > _MAX_TREE_DEPTH:
        return math.inf
    if isinstance(expression, Rational):
        return max(_log10(int(expression.p)), _log10(int(expression.q)))
    if isinstance(expression, Float):
        return abs(float(expression._mpf_[2] + expression._mpf_[3]) * math.log10(2))
    args = expression.flat() if isinstance(expression, MatrixBase) else getattr(expression, "args", ())
    sizes = [num_digits(arg, depth + 1) for arg in args]
    if not sizes:
        return 0.0
    largest = max(sizes)
    if isinstance(expression, Add):
        return largest + _log10(len(sizes))
    if isinstance(expression, Mul):
        return sum(sizes)
    if isinstance(expression, Pow):
        return max(sizes[0] * _value(sizes[1]), largest)
    if isinstance(expression, exp):
        return max(_value(largest) * math.log10(math.e), largest)
    if isinstance(expression, factorial | gamma | binomial):
        return _value(largest) * max(largest, 1.0)
    if isinstance(expression, Sum | Product):
        return max(sizes[0], *(_value(size) for size in sizes[1:]))
    return largest


def _value(digits: float) -> float:
    return 10.0 ** min(digits, 300.0)  # below the largest float


def _log10(number: int) -> float:
    return math.log10(abs(number)) if number else 0.0
