"""An answer that needs more memory or time than any computer has is wrong at once, without a timeout.

Without these limits nearly all of these answers would run until the worker is killed.
"""

import random

import pytest
from math_verify import parse
from sympy import Add, Basic, Integer, Mul, Pow, Rational, binomial, factorial

from meshrl.reward.expression_size import MAX_DIGITS, can_be_parsed, num_digits
from meshrl.reward.math_answer import math_answer

TOO_LARGE = {
    "tower": "9^{9^{9^{9}}}",
    "tower of ten": "10^{10^{10}}",
    "tower of floats": "9.5^{9.5^{9.5^{9.5}}}",
    "tower of e": "e^{e^{e^{e^{e}}}}",
    "tower in an exponent": "x^{9^{9^{9}}}",
    "tower below 1": "9^{-9^{9^{9}}}",
    "fraction to a power": "(\\frac{1000001}{1000000})^{10^{9}}",
    "power": "2^{1000000}",
    "power of a sum": "(7+8)^{10^{9}}",
    "power of a product": "(7 \\cdot 8)^{10^{9}}",
    "power in a logarithm": "\\log_2(9^{9^{9}})",
    "power in a matrix": "\\begin{pmatrix}1&9^{9^{9}}\\\\0&1\\end{pmatrix}",
    "factorial": "100000!",
    "factorials": "9!!!!!!",
    "gamma": "\\Gamma(10^{9})",
    "factorial of a power": "(10^{9})!",
    "many factorials": "9" + "!" * 150,
    "binomial": "\\binom{10^9}{5\\cdot10^8}",
    "binomial of digits": "\\binom{1000000}{500000}",
    "binomial below": "\\binom{x}{10^9}",
    "binomial of factorials": "\\dbinom{9!}{5}",
    "sum": "\\sum_{n=1}^{10^9} n^{-n}",
    "product": "\\prod_{n=1}^{10^9} n",
    "brackets": "(" * 2000 + "1" + ")" * 2000,
    "opening brackets": "(" * 2000,
    "braces": "{" * 40 + "1" + "}" * 40,
    "nested roots": "\\sqrt{2+" * 30 + "1" + "}" * 30,
    "nested fractions": "\\frac{1}{1+" * 30 + "1" + "}" * 30,
    "long sum": "+".join(["7"] * 600),
    "long product": "\\cdot".join(["7"] * 300),
    "carets without braces": "x" + "^x" * 20,
    "bars": "|" * 50,
    "bars around letters": "|x" * 30,
    "long list": ",".join(str(n) for n in range(150)),
    "long list of pairs": ",".join(["(1,2)"] * 100),
    "many digits": "7" * 100_000,
}

FINE = [
    "x^{2024}",
    "2^{2024} - 1",
    "100!",
    "\\binom{2024}{1012}",
    "\\binom{n}{k} \\cdot 2^{10}",
    "\\sum_{k=0}^{n} \\binom{n}{k}",
    "\\sum_{k=1}^{100} k",
    "\\frac{\\sqrt{2+\\sqrt{3}}}{2^{\\frac{1}{3}}}",
    "\\left(\\left(\\frac{1}{2}\\right)^{n}, \\left\\{1, 2\\right\\}\\right)",
    "10^{-10}",
    "e^{100}",
    "x^2+y^2+z^2+x^3+y^3+z^3+x^4+y^4+z^4",
    "|x-1| + |x-2| + |x-3|",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
]


def fits(text: str) -> bool:
    """Whether math_answer evaluates this."""
    boxed = f"\\boxed{{{text}}}"
    return can_be_parsed(boxed) and num_digits(parse(boxed, parsing_timeout=None)[0]) <= MAX_DIGITS


@pytest.mark.parametrize("text", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_too_large_expression_is_wrong_unless_it_equals_the_reference(text):
    assert not fits(text)
    assert math_answer(f"\\boxed{{{text}}}", "5") == 0.0
    assert math_answer(f"\\boxed{{{text}}}", text) == 1.0


@pytest.mark.parametrize("text", FINE)
def test_usual_expressions_are_evaluated(text):
    assert fits(text)


def test_a_long_list_between_dollars_is_wrong_too():
    pairs = ",".join(["(1,2)"] * 100)
    assert not can_be_parsed(f"${pairs}$")
    assert math_answer(f"The answer is ${pairs}$", "5") == 0.0


def test_a_tower_without_latex_is_wrong_too():
    assert math_answer("The answer is 9^9^9^9", "5") == 0.0


def test_brackets_that_prose_leaves_open_do_not_add_up():
    assert math_answer("a) ( we know: (\n\n" * 20 + "The answer is 5", "5") == 1.0


def random_number(rng: random.Random, depth: int) -> Basic:
    """An unevaluated tree of sums, products, powers, factorials and binomials."""
    if depth == 0:
        return rng.choice([Integer(rng.randint(0, 12)), Rational(rng.randint(1, 9), rng.randint(1, 9))])
    kind = rng.choice([Add, Mul, Pow, factorial, binomial])
    args = [random_number(rng, depth - 1) for _ in range(1 if kind is factorial else 2)]
    return kind(*args, evaluate=False)


def test_no_number_is_larger_than_its_estimate():
    rng = random.Random(0)
    compared = 0
    for _ in range(3000):
        expression = random_number(rng, rng.randint(1, 3))
        estimate = num_digits(expression)
        if estimate > 300:
            continue
        value = expression.doit()
        if value.is_Rational:
            compared += 1
            assert abs(value) <= 1.001 * 10**estimate, expression
    assert compared > 1000
