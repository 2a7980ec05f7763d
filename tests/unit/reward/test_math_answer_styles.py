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
    # ---- prose without a box: the formula is read as a whole, or not at all
    "negative number with a space": ("The answer is - 5", ["-5"], ["5"]),
    "minus as a word": ("The answer is minus 5.", ["-5"], ["5"]),
    "negative as a word": ("The answer is negative 5", ["-5"], ["5"]),
    "minus in a tag": ("<answer>minus 5</answer>", ["-5"], ["5"]),
    "negative amount": ("The answer is -$5.", ["-5"], ["5"]),
    "multiple of pi": ("The answer is 3\u03c0", ["3\\pi"], ["3", "\\pi"]),
    "multiple of pi in letters": ("The answer is 3pi.", ["3\\pi", "3\u03c0"], ["3"]),
    "multiple of a root": ("The answer is 5\u221a3", ["5\\sqrt{3}", "5\u221a3"], ["5", "3"]),
    "root of a sum": ("The answer is \u221a(x+1).", ["\\sqrt{x+1}"], ["x+1", "1"]),
    "superscript": ("The answer is 2\u00b3", ["8", "2^3"], ["2", "3"]),
    "superscript of a variable": ("So the answer is x\u00b2 + 1.", ["x^2+1"], ["x+1", "1", "2"]),
    "half": ("The answer is \u00bd", ["1/2", "0.5"], ["1", "2"]),
    "mixed number with a vulgar fraction": ("The answer is 5\u00bd.", ["5.5", "11/2"], ["5", "1/2"]),
    "mixed number in prose": ("The answer is 3 1/2.", ["3.5", "7/2"], ["3", "1/2", "31/2"]),
    "mixed number of cups": ("The answer is 3 1/2 cups", ["3.5"], ["3", "1/2"]),
    "mixed number as reference": ("The answer is 3.5", ["3 1/2", "3\u00bd"], ["31/2"]),
    "multiple of a variable": ("The answer is 5x", ["5x"], ["5"]),
    "factorial in prose": ("The answer is 3!", ["6"], ["3"]),
    "superscript of ten": ("The answer is 5\u00d710\u2076.", ["5000000", "5e6"], ["5", "10"]),
    "millions": ("The answer is 5 million.", ["5000000", "5 million"], ["5"]),
    "amount in billions": ("The answer is $1.2 billion", ["1200000000"], ["1.2"]),
    "millions in a box": ("\\boxed{5 \\text{ million}}", ["5000000"], ["5"]),
    "pair in prose": ("The answer is (3, 4).", ["(3,4)"], ["4", "3", "(4,3)"]),
    "interval in prose": ("The answer is [3, 4]", ["[3,4]"], ["4", "3"]),
    "set in prose": ("The answer is {3, 4}", ["\\{3,4\\}"], ["4", "3"]),
    "alternatives in prose": ("The answer is 3 or 4.", ["3, 4"], ["3", "4"]),
    "alternatives after the mark": ("#### 5 or 6", ["5, 6"], ["5", "6"]),
    "complex number in prose": ("The answer is 2 + 3i", ["2+3i"], ["2", "3"]),
    "two variables in prose": ("The answer is x = 5 and y = 6", ["x=5, y=6"], ["6", "5"]),
    "inequality in prose": ("The answer is x > 5.", ["x>5"], ["5"]),
    "lower limit": ("The answer is at least 5", [], ["5"]),
    "negation": ("The answer isn't 5", [], ["5"]),
    "negation after is": ("The answer is not 5.", [], ["5"]),
    "equation after answer is": ("The answer is 2 + 3 = 5.", ["5"], ["2", "3", "6"]),
    "interval to infinity": ("The answer is (0, \u221e).", ["(0,\\infty)"], ["0"]),
    "product in words": ("The answer is 5 and a half", [], ["5"]),
    "unit after a number": ("The answer is 42 apples.", ["42"], ["4", "2"]),
    "amount per week": ("The answer is $42 per week.", ["42"], ["4"]),
    "dollars": ("The answer is 18 dollars", ["18", "18 dollars"], ["1", "8"]),
    "dollars in a box": ("\\boxed{18 dollars}", ["18"], ["1", "-18"]),
    "amount before a conjunction": ("The answer is $1,200 and he is happy.", ["1200"], ["1", "200"]),
    "unit without a space": ("The answer is 12cm", ["12"], ["1"]),
    "product of variables in prose": ("The answer is 2xy", ["2xy"], ["2"]),
    "product of variables in a box": ("\\boxed{2xy}", ["2yx"], ["2"]),
    "equals sign in a box": ("\\boxed{= 5}", ["5"], ["4"]),
    "about in a box": ("\\boxed{\\approx 5}", ["5"], ["4"]),
    "sentence with one number": ("Answer: John has 5 apples.", ["5"], ["4"]),
    "sentence with a reason": ("The answer is 42 because 6 times 7 is 42.", ["42"], ["6", "7"]),
    "sentence after the answer": ("The answer is 5. I hope it is correct.", ["5"], ["4"]),
    "value of a variable": ("The answer is that the value of x is 5.", ["5"], ["4", "x"]),
    "last of two values": ("So 3 of 8 are left.\nThe total is 5 apples", ["5"], ["3", "8"]),
    "answer after LaTeX": ("Since $x=2$, the answer is 5x.", ["5x"], ["5", "2"]),
    "answer in LaTeX": ("So the final answer is $-5$.", ["-5"], ["5"]),
    # ---- boxes that can't be parsed
    "line break in a box": ("\\boxed{7 \\\\ 5}", [], ["5", "7"]),
    "column in a box": ("\\boxed{7 & 5}", [], ["5", "7"]),
    "or in a box": ("\\boxed{7 \\lor 5}", ["5, 7"], ["5", "7"]),
    "or of equations in a box": ("\\boxed{x=7 \\lor x=5}", ["5,7", "x=5, x=7"], ["5", "7"]),
    "divisor in a box": ("\\boxed{7 \\mid 5}", [], ["5", "7"]),
    "arrow in a box": ("\\boxed{7 \\to 5}", [], ["5", "7"]),
    "congruence in a box": ("\\boxed{7 \\equiv 5 \\pmod{3}}", [], ["5", "7", "3"]),
    "question marks in a box": ("\\boxed{7 ?? 5}", [], ["5", "7"]),
    "stray bracket in a box": ("\\boxed{7) 5}", [], ["5", "7"]),
    "less than in a box": ("\\boxed{< 5}", [], ["5"]),
    "at least in a box": ("\\boxed{\\geq 5}", [], ["5"]),
    "false equation in a box": ("\\boxed{5=6}", [], ["6", "5"]),
    "rounded equation in a box": ("\\boxed{\\frac{1}{3} = 0.33}", ["0.33"], ["0.34"]),
    # ---- typography of numbers, units and choices
    "spaces between thousands": ("The answer is 1 000 000", ["1000000"], ["0", "1"]),
    "narrow spaces between thousands": ("The answer is 1\u202f000\u202f000.", ["1000000"], ["0", "1"]),
    "no-break spaces in a box": ("\\boxed{1\u00a0000\u00a0000}", ["1000000"], ["0", "1"]),
    "tilde between thousands": ("\\boxed{12~345}", ["12345"], ["345", "12"]),
    "degree sign": ("The answer is 90\u00b0", ["90", "90^\\circ"], ["9"]),
    "degree sign in a box": ("\\boxed{90\u00b0}", ["90", "90\u00b0"], ["9", "0"]),
    "temperature": ("42 \u00b0C", ["42"], ["4"]),
    "euros": ("The answer is \u20ac42.", ["42"], ["4"]),
    "pounds": ("\u00a31,200", ["1200"], ["1", "200"]),
    "number and unit in text": ("\\boxed{\\text{5 cm}}", ["5"], ["4"]),
    "trailing comma in a box": ("\\boxed{5,}", ["5"], ["4"]),
    "unclosed tag": ("<think>It is 4.</think><answer>5", ["5"], ["4"]),
    "choice in prose": ("The answer is (C).", ["C"], ["B", "5"]),
    "bold choice": ("Answer: **(C)**", ["C"], ["B"]),
    "choice without brackets": ("The answer is C. The others are wrong.", ["C"], ["B"]),
    "choice and its value": ("\\boxed{\\textbf{(C)}\\ 5}", ["C", "(C)"], ["B", "4"]),
    "choice and its text": ("The answer is (C) Paris.", ["C"], ["B", "P"]),
    "capital letter of a word": ("Yes", ["yes"], ["no"]),
    "word in prose": ("The answer is Yes.", ["yes", "\\text{Yes}"], ["no"]),
    "word in a box": ("\\boxed{\\text{Yes}}", ["yes"], ["no"]),
    "letters of a word": ("\\boxed{Paris}", ["Paris"], ["Rome"]),
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
