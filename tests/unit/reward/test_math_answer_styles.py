"""P41: a reward rule that fits by accident. A user would see a right answer graded 0 or a wrong one graded 1, and
mostly nothing: the curve still rises.

Answers in the styles that models write, labelled by hand, each with references that it states and ones that it doesn't.
"""

import pytest

from meshrl.reward.math_answer import math_answer

STYLES = {
    # style: (completion, references that it states, references that it does not state)
    # ---- headings and the mark of GSM8K
    "numbered headings, then a box": (
        "#### 1. Plan\nAdd.\n#### 2. Work\n2+3=5\nThe answer is $\\boxed{5}$",
        ["5", "5.0", "2+3\n#### 5"],
        ["1", "2", "3", "-5", "2+3\n#### 1"],
    ),
    "a heading with the number of another answer": ("#### 1. Plan\nWe add 2 and 3.\n$\\boxed{5}$", ["5"], ["1", "2"]),
    "a heading in the last line": ("The answer is $\\boxed{5}$\n\n#### 3. Check", ["5"], ["3"]),
    "a heading called answer": ("#### Step 1: Add\n2+3 = 5\n#### Answer\n5", ["5"], ["1", "2"]),
    "a heading that states the answer": ("### Step 1\n2+3=5\n### Answer: 5", ["5"], ["1", "3"]),
    "mark": ("2+3=5\n#### 5", ["5", "x\n#### 5"], ["2", "3", "-5", "x\n#### 4"]),
    "mark after a box": ("Each day \\boxed{3}.\n#### 21", ["21"], ["3"]),
    "mark after a mark": ("#### 7\nNo:\n#### 72\n", ["72"], ["7"]),
    "mark with $, commas and period": ("#### $1,234.", ["1234", "1,234", "x\n#### 1,234"], ["1", "234", "1.234"]),
    "mark with cents": ("#### $1,234.50", ["1234.5", "1234.50"], ["1234", "123450"]),
    "mark with zeros": ("#### 72.0", ["72", "72.00"], ["720", "7.2"]),
    "mark with a negative amount": ("#### -$5", ["-5"], ["5"]),
    "mark with a minus sign": ("#### \u22125", ["-5"], ["5"]),
    "mark with emphasis": ("#### **5**", ["5"], ["4"]),
    "mark with a unit": ("#### 5 apples", ["5"], ["4"]),
    "mark with a percentage": ("#### 50%", ["50%", "50\\%", "0.5"], ["5", "500"]),
    "mark with a fraction": ("#### \\frac{1}{2}", ["1/2", "0.5"], ["2", "1"]),
    "mark with a box": ("#### \\boxed{5}", ["5"], ["4"]),
    "mark without a space": ("####5", ["5"], ["4"]),
    "mark and more text": ("#### 5\n\nI hope this helps!", ["5"], ["4"]),
    # ---- prose and Markdown
    "the answer is": ("We add 2 and 3, so the answer is 5.", ["5"], ["2", "3", "4"]),
    "currency": ("She pays $12 less, so the total is $1,234.", ["1234"], ["12", "1", "234"]),
    "escaped currency": ("The total is \\$1,234.50", ["1234.5"], ["1", "1234", "50"]),
    "bold": ("First 2, then **5**", ["5"], ["2", "4"]),
    "bold sentence": ("**The answer is 5.**", ["5"], ["4"]),
    "bold label": ("**Answer:** 5", ["5"], ["4"]),
    "italics": ("First 2, then *5*", ["5"], ["2"]),
    "underscores": ("First 2, then __5__", ["5"], ["2"]),
    "code": ("First 2, then `5`", ["5"], ["2"]),
    "numbered list": ("1. Add 2 and 3\n2. Get 5\n\nAnswer: 5", ["5"], ["1", "2", "3"]),
    "equation": ("2 + 3 = 5", ["5"], ["2", "3"]),
    "nothing": ("I do not know.", [], ["5", "0"]),
    "word": ("Paris", ["Paris"], ["Rome"]),
    # ---- tags
    "tags without spaces": ("<think>6*7</think><answer>42</answer>", ["42"], ["6", "7", "41"]),
    "tags with spaces": ("<think> 6*7 </think>\n<answer> 42 </answer>", ["42"], ["6", "7"]),
    "another number in the reasoning": ("<think>It is 41.</think><answer>42</answer>", ["42"], ["41"]),
    "a box in the reasoning": ("<think>So \\boxed{41}?</think>The answer is 42", ["42"], ["41"]),
    "two answers": ("<answer>41</answer> No: <answer>42</answer>", ["42"], ["41"]),
    "no answer after the reasoning": ("<think>It is 41.</think>", [], ["41"]),
    "reasoning opened in the prompt": ("It is 41.</think>\n\n42", ["42"], ["41"]),
    "box in a tag": ("<think>1</think><answer>\\boxed{42}</answer>", ["42"], ["1"]),
    "formula in a tag": ("<answer>2\\sqrt{3}</answer>", ["2\\sqrt{3}", "\\sqrt{12}"], ["2", "3"]),
    "polynomial in a tag": ("<answer>x^2 + 1</answer>", ["1+x^2"], ["x^2", "1", "2"]),
    "pair in a tag": ("<answer>(3, 5)</answer>", ["(3,5)"], ["(5,3)", "3", "5"]),
    # ---- signs
    "minus": ("The answer is -5", ["-5"], ["5"]),
    "minus sign": ("The answer is \u22125", ["-5", "\u22125"], ["5"]),
    "minus sign alone": ("\u22125", ["-5"], ["5"]),
    "full-width minus": ("The answer is \uff0d5", ["-5"], ["5"]),
    "en dash as minus": ("\\boxed{\u20135}", ["-5"], ["5"]),
    "hyphen as minus": ("The answer is \u20105", ["-5"], ["5"]),
    "minus sign between numbers": ("8 \u2212 3 = 5", ["5"], ["-3", "-5"]),
    "range": ("It takes 3\u20135 days, so the answer is 4", ["4"], ["-5", "5"]),
    "negative fraction": ("\\boxed{\u2212\\frac{3}{4}}", ["-3/4", "-0.75"], ["3/4", "-4/3"]),
    # ---- boxes
    "box": ("So $\\boxed{5}$.", ["5", "5.0", "\\frac{10}{2}"], ["4", "-5"]),
    "box with a period": ("\\boxed{5.}", ["5"], ["4"]),
    "box in display math": ("\\[ \\boxed{5} \\]", ["5"], ["4"]),
    "corrected box": ("First \\boxed{3}. No, wait, that is wrong: \\boxed{5}", ["5"], ["3", "3, 5"]),
    "corrected box in dollars": ("$\\boxed{3}$ is wrong.\n$\\boxed{5}$", ["5"], ["3", "3, 5"]),
    "boxes in a list": ("\\boxed{3}, \\boxed{5}", ["3, 5", "5, 3"], ["5", "3", "3, 6"]),
    "boxes of two variables": ("$x = \\boxed{3}$ or $x = \\boxed{5}$", ["3, 5"], ["5", "3"]),
    "list in a box": ("\\boxed{3, 5}", ["3, 5", "5, 3"], ["5", "3, 6"]),
    "set": ("\\boxed{\\{3, 5\\}}", ["\\{5, 3\\}"], ["\\{3\\}", "\\{3, 6\\}"]),
    "half-open interval": ("\\boxed{[1, 2)}", ["[1,2)"], ["[1,2]", "(1,2)", "(1,2]"]),
    "assignment": ("\\boxed{x = 5}", ["5", "x=5"], ["4"]),
    "empty box": ("\\boxed{}", [], ["5", "0"]),
    # ---- numbers
    "thousands": ("\\boxed{1,234}", ["1234"], ["1", "234"]),
    "thin space": ("\\boxed{1\\,234}", ["1234"], ["1", "234"]),
    "braced comma": ("\\boxed{1{,}234}", ["1234"], ["1.234"]),
    "no-break space": ("The answer is 1\u00a0234", ["1234"], ["1", "234"]),
    "fraction": ("\\boxed{\\dfrac{3}{4}}", ["3/4", "0.75", "\\frac{3}{4}", "6/8"], ["4/3", "3", "4"]),
    "fraction without braces": ("\\boxed{\\frac34}", ["3/4"], ["34", "4/3"]),
    "plain fraction": ("The answer is 3/4.", ["3/4", "0.75"], ["3", "4"]),
    "mixed number": ("\\boxed{1\\frac{1}{2}}", ["3/2"], ["1/2", "1"]),
    "rounded third": ("\\boxed{0.333333}", ["1/3"], ["0.34", "0.3334"]),
    "rough third": ("\\boxed{0.33}", ["0.33"], ["1/3"]),
    "percentage": ("\\boxed{42\\%}", ["42%", "42\\%", "0.42"], ["4.2", "43\\%", "4200"]),
    "percent as a word": ("It is 42 percent", ["42%", "0.42"], ["43%", "4.2"]),
    "e notation": ("1.5e3", ["1500", "1.5e3", "1.5E+3"], ["1.5", "3", "15000"]),
    "e notation in prose": ("The answer is 1.5e3.", ["1500"], ["1.5", "3"]),
    "e notation in a box": ("\\boxed{1.5e-3}", ["0.0015", "1.5 \\times 10^{-3}"], ["1.5", "1500", "0.0016"]),
    "times ten in LaTeX": ("$1.5 \\times 10^{3}$", ["1500", "1.5e3"], ["1.5", "10", "15"]),
    "times ten in prose": ("The answer is 1.5 \u00d7 10^3", ["1500"], ["1.5", "10", "15"]),
    "times ten with an x": ("1.5 x 10^3", ["1500"], ["1.5", "10"]),
    "times ten with a superscript": ("The answer is 1.5 \u00d7 10\u207b\u00b3", ["0.0015"], ["1.5", "1500"]),
    "small numbers differ": ("The answer is 0.0000001", ["1e-7", "0.0000001"], ["0.0000002", "2e-7"]),
    "Euler's number": ("\\boxed{2e + 3}", ["3+2e"], ["2e3", "2000", "5"]),
    "power of ten": ("\\boxed{10^{10}}", ["10000000000"], ["1010", "10"]),
    "factorial": ("\\boxed{5!}", ["120"], ["5"]),
    "binomial": ("\\boxed{\\binom{5}{2}}", ["10"], ["5", "2"]),
    "huge power": ("\\boxed{10^{10^{10}}}", ["10^{10^{10}}"], ["10^{10^{11}}", "10"]),
    "roots": ("\\boxed{\\frac{\\sqrt{2}}{2}}", ["1/\\sqrt{2}", "\\sqrt{1/2}"], ["\\sqrt{2}", "2"]),
    # ---- units and wrappers
    "unit": ("\\boxed{5 \\text{ cm}}", ["5"], ["4"]),
    "square unit": ("\\boxed{5\\,\\text{cm}^2}", ["5"], ["25", "2"]),
    "speed": ("\\boxed{5 \\mathrm{~km/h}}", ["5"], ["4"]),
    "degrees": ("\\boxed{45^\\circ}", ["45", "45^\\circ"], ["4"]),
    "unit in prose": ("The answer is 5 cm.", ["5"], ["4"]),
    "number in text": ("\\boxed{\\text{5}}", ["5"], ["4"]),
    "number in bold": ("\\boxed{\\mathbf{5}}", ["5"], ["4"]),
    "word in text": ("\\boxed{\\text{even}}", ["\\text{even}", "even"], ["\\text{odd}", "5"]),
    "choice in text": ("\\boxed{\\text{(B)}}", ["B", "\\text{B}"], ["A", "C"]),
}

CASES = [
    pytest.param(completion, reference, right, id=f"{style}: {'is' if right else 'is not'} {reference!r}")
    for style, (completion, stated, others) in STYLES.items()
    for right, references in ((1.0, stated), (0.0, others))
    for reference in references
]


@pytest.mark.parametrize(("completion", "reference", "right"), CASES)
def test_the_default_rule_grades_the_answer_that_is_stated(completion, reference, right):
    assert math_answer(completion, reference) == right


@pytest.mark.parametrize(
    ("completion", "reference", "right"),
    [
        ("<think>So \\boxed{41}?</think>The answer is 42", "42", 1),
        ("<think>So \\boxed{41}?</think>The answer is 42", "41", 0),
        ("\\boxed{\u22125}", "-5", 1),
        ("\\boxed{1.5e3}", "1500", 1),
        ("The answer is 0.0000001", "0.0000002", 0),
        ("First \\boxed{3}. No, wait, that is wrong: \\boxed{5}", "5", 1),
    ],
)
def test_the_rule_math_verify_reads_the_same_styles(completion, reference, right):
    assert math_answer(completion, reference, rule="math_verify") == right


@pytest.mark.parametrize(("completion", "reference"), [("1.5e3", "1500"), ("\u22125", "-5"), ("2E-2", ".02")])
def test_the_rule_exact_knows_e_notation_and_the_minus_sign(completion, reference):
    assert math_answer(completion, reference, rule="exact") == 1.0
    assert math_answer(completion, f"{reference}1", rule="exact") == 0.0
