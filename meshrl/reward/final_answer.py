"""The part of a completion that states its final answer, in a form that math-verify reads.

Models write the same answer in many styles: after reasoning between think tags, between answer tags, in the last of
several boxes, after the mark `#### ` of GSM8K, with Markdown emphasis, typographic dashes or Unicode operators.
Without a box, the expression that plain text states is read: "the answer is minus 5", "5½ cups", "3 or 4", "$42 per
week", "5 million". math-verify takes a number out of such text and ignores the text around it, so that "3π" would equal
3. Here a formula is read completely, a number may have words around it, and text that states no single value is not
read.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal

_NUMBER = r"[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+"
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = "|".join(_SCALES)
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\ufe63\uff0d", "-"),  # minus signs
        **dict.fromkeys("\u00a0\u2009\u202f", " "),  # spaces that separate thousands
        **dict.fromkeys("×·", "*"),
        **{"：": ":", "，": ", ", "。": ". "},
        **{"π": "\\pi ", "∞": "\\infty ", "∈": "\\in "},  # math-verify reads other operators, such as ≤ and ∪
    }
)
_SUPERSCRIPTS = str.maketrans("⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "-+0123456789")


def _fraction(match: re.Match[str]) -> str:
    fraction = unicodedata.normalize("NFKC", match[2]).replace("\u2044", "/")
    return f"({match[1]}+{fraction})" if match[1] else f"({fraction})"


def _repeating(integer: str, decimals: str, period: str) -> str:
    nines = "9" * len(period) + "0" * len(decimals)
    return f"\\frac{{{int(integer + decimals + period) - int(integer + decimals or 0)}}}{{{nines}}}"


def _scaled(match: re.Match[str]) -> str:
    number = Decimal(match[1].replace(",", ""))
    return format(number.scaleb(_SCALES[(match[2] or match[3]).lower()]), "f")


_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<![\w*`)}])(\*{1,3}|_{1,3}|`{1,3})(?=\S)([^*_`\n]+?)(?<=\S)\1(?![\w*`({\\])"), r"\2"),  # emphasis
    (re.compile(r"(?<![\w)}\]])[\u2010-\u2013](?=[0-9.$\\])"), "-"),  # hyphens and en dash; 3–5 is a range
    (re.compile(r"(?<!\\)\\\$"), ""),  # an escaped dollar
    (re.compile(r"(?<=[0-9])(?:\\[,;: ]|~)(?=[0-9]{3}(?![0-9]))"), ""),  # thin spaces between thousands
    (re.compile(r"(?<=[0-9]) ?x ?(?=10 ?\^)"), "*"),  # 1.5 x 10^3
    (re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*([-+(]?[.0-9][^{}\\]{0,160})\}"), r"\1"),  # upright numbers
    (
        re.compile(r"(?<![0-9])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s*\{([0-9]{1,20})\}"),
        lambda m: _repeating(m[1], m[2], m[3]),
    ),
    (
        re.compile(r"(?<=[0-9])(\s*\\text\s*\{\s*(?!and|or)[^{}]{0,80}[a-z]{2}[^{}]{0,80}\})(?=\s*[a-z]\s*=)"),
        ", ",
    ),  # 5 \text{but} x=6
    (re.compile(r"[€£¥₹] ?(?=[0-9.])|(?<=[0-9]) ?[€£¥₹]"), ""),
    (re.compile(r"(?<=[0-9]) ?°(?: ?[CF]\b)?"), ""),
    (re.compile(r"(?<=[0-9])\s*(?:percent|pct)\b", re.IGNORECASE), "%"),
    (re.compile(r"(?<![0-9] )(?<![\w.,^/])[0-9]{1,3}(?: [0-9]{3})+(?![\w/^])"), lambda m: m[0].replace(" ", "")),
    (re.compile(r"(?<![0-9])([0-9]*) ?([¼-¾⅐-⅞])"), _fraction),  # 5½
    (re.compile(r"(?<![\w.,^/*)])([0-9]+) ([0-9]+/[0-9]+)(?![\w/])"), r"(\1+\2)"),  # mixed numbers: 5 1/2
    (re.compile(r"(?<=[\w)}\]])([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"), lambda m: f"^({m[1].translate(_SUPERSCRIPTS)})"),
    (
        re.compile(r"√ ?(?:\(([^()]*)\)|([0-9.]+|[a-z]))|(?<![\\\w])sqrt ?\(([^()]*)\)"),
        lambda m: f"\\sqrt{{{m[1] or m[2] or m[3]}}}",
    ),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (
        re.compile(rf"(?<![0-9.,])({_NUMBER})\s*(?:\\text ?{{\s*({_SCALE})\s*}}|({_SCALE})\b)", re.IGNORECASE),
        _scaled,  # 5 million
    ),
    (re.compile(r"\b(?:minus|negative) +(?=[0-9.$\\(])", re.IGNORECASE), "-"),
]
"""(pattern, replacement), applied in this order."""

_ANSWER_IS = re.compile(
    r"(?:\banswer\b[^.\n:=]{0,60}?(?:\b(?:is|are)\b|[:=])|答案[^.\n:=]{0,20}?[是为:])[\s:]*(?=\S)", re.IGNORECASE
)
_VALUE_IS = re.compile(r"(?:(?<![<>!≤≥≠])=|≈|:(?![0-9])|\b(?:is|are|equals)\b)\s*(?=\S)")
_SENTENCE = re.compile(r"(?:[^.\n]|\.(?=\S))*")
_LATEX = re.compile(r"\$|\\\(|\\\[|\\f?boxed")
_WORDS_OF_FORMULAS = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+|(?<![a-zA-Z])(?:sin|cos|tan|log|ln|exp)(?![a-zA-Z])"
)
_WORD = re.compile(  # or a unit: 5cm and 5apples, but 2xy is a product
    r"(?<![\w\\{])[^\W\d_]{2,}|(?<=[0-9])(?:[^\W\d_]{3,}|[ckmn]m|[km]g|m[lLs]|ft|oz|lb|in|[ap]m)(?![a-zA-Z])"
)
_CONJUNCTION = re.compile(r"(?<!\s)\s{0,3},?\s{1,3}(?:and|or)\s+")
_LEADING_WORDS = re.compile(r"(?:(?:[a-zA-ZÀ-ÿ][a-zA-ZÀ-ÿ'’\-]+|[aAI])[,:]?\s+)*")
_LIMIT = re.compile(
    r"(?:\b(?:not|least|most|than|over|under|above|below|between|nor|never|cannot|except|twice|double|triple"
    r"|(?<!add )(?<!adds )(?<!sum )(?<!sums )up to|anything but"
    r"|(?:half|root|reciprocal|negative|opposite|inverse) of)|n['’]t)\b[^.]{0,12}$",
    re.IGNORECASE,
)
_SINGLE_NUMBER = re.compile(rf"[-+]?(?:{_NUMBER})(?: ?/ ?[0-9]+)?\s*(?:\\?%)?")
_POWER = r"(?:\^?[({]?[23][)}]?)?"
_PLAIN_UNIT = rf"(?:(?:[cdkmn]?m|ft|in|yd|mi){_POWER}|[mk]?g|m?[lL]|h|s|lb|oz|mph)"
_SHORT_UNIT = rf"{_PLAIN_UNIT}(?:/(?:{_PLAIN_UNIT}{_POWER}|hr|min|sec|day|mol))?"
_LENGTH_UNIT = re.compile(rf"({_SINGLE_NUMBER.pattern})\s+{_SHORT_UNIT}")  # m^2, m/s^2
_UNIT = re.compile(  # a word, such as apples, or a short unit and more words
    rf"({_SINGLE_NUMBER.pattern})(?:\s+(?:[^\W\d_]{{3,}}|{_SHORT_UNIT}(?=[ /]))|\s*(?![万億亿千百十半])[\u3040-\u9fff])"
    rf"(?:[^\d\\=+*^<>|(){{}}]|\([^()\d\\]*\)|(?<=[a-z])\^?[({{]?[23][)}}]?(?!\w)|(?<=[A-Z])[0-9])*"
)
_OPERATION = (  # functions, products of variables, and words that change the number
    r"a?(?:sin|cos|tan)|cot|csc|log|exp|gcd|lcm|det|mod|modulo|dozens?|hundreds?|hal(?:f|ves)|quarters?|thirds?|pi|squared|cubed"
    r"|factorial|plus|minus|remainder|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|[a-d]+|[u-z]+|[a-dx-z]+|[b-df-hj-np-tv-xz]{3,}"
)
_CONNECTIVE = re.compile(
    rf"(?:and|or|to|plus|minus|times|over)\s+(?:[-$]*[0-9]|[a-z]\b|half|more|less|fewer)|(?:{_OPERATION})\b"
    rf"|(?:more|less|fewer|greater|larger|smaller) than\b|(?:divided|multiplied) by\b|choose [0-9]"
    r"|(?:feet|foot|ft|hours?|minutes?|years?|months?|weeks?|days?|dollars?|pounds?|yards?|meters?)\b,? (?:and )?"
    r"[0-9]",
    re.IGNORECASE,
)
_NOT_A_UNIT = re.compile(
    rf"\b(?:{_OPERATION}|but|or|not|nor|if|when|unless)\b|(?<![\w'’])[b-fi-kn-rt-z](?![\w'’])"
    r"|\band (?:a )?(?:half|more|less|fewer)\b",
    re.IGNORECASE,
)


def normalized(text: str) -> str:
    """`text` without Markdown emphasis and signs of currencies and degrees, with ASCII signs for Unicode operators, and
    with mixed numbers, thousands, millions, roots and superscripts written as math-verify reads them."""
    text = text.strip().translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def stated_expression(text: str) -> str | None:
    """The expression that follows the last "answer is" in `text`, or else the expression in its last line.

    Empty for a statement without a single value ("at least 5"); None for text that math-verify has to search.
    """
    if (sentence := _after_answer_is(text)) is not None:
        statement = _without_currency(sentence)
        if _LATEX.search(statement) or statement.startswith("#"):
            return None
        expression = _expression(statement)
        return expression if expression is not None or not re.search("[0-9]", statement) else ""
    line = _without_currency(text.strip().rpartition("\n")[2])
    if _LATEX.search(_without_currency(text)) or line.startswith("#"):
        return None
    values = list(_VALUE_IS.finditer(line))
    for statement in (line, line[values[-1].end() :] if values else ""):
        if _is_formula(_CONJUNCTION.sub(", ", statement)) or len(re.findall(_NUMBER, statement)) == 1:
            return _expression(statement)
    return None if "\n" in text.strip() or re.search("[0-9]", line) else _expression(line)


def statement(text: str) -> str:
    """The words that state the answer: those after the last "answer is", or else the end of the last line."""
    sentence, line = _after_answer_is(text), text.strip().rpartition("\n")[2].lstrip("# ")
    return _VALUE_IS.split(line)[-1] if sentence is None else sentence


def _after_answer_is(text: str) -> str | None:
    statements = list(_ANSWER_IS.finditer(text))
    sentence = _SENTENCE.match(text, statements[-1].end()) if statements else None
    return sentence and sentence[0]


def number_with_unit(text: str) -> str | None:
    """The number in "18 dollars", which a box may contain; None for anything else."""
    if match := _LENGTH_UNIT.fullmatch(text):
        return match[1]
    match = _UNIT.fullmatch(text.lstrip("$"))
    return None if match is None or _NOT_A_UNIT.search(match[0]) else match[1]


def _expression(statement: str) -> str | None:
    """The formula, or the number with words around it, of one sentence without LaTeX delimiters."""
    statement = statement.strip().rstrip(".,;: ")
    if number := number_with_unit(statement):
        return number
    listed = _CONJUNCTION.sub(", ", statement)
    if _is_formula(listed):
        return listed
    before = _LEADING_WORDS.match(statement)
    start = before.end() if before else 0
    word = _WORD.search(statement, start)
    formula = statement[start : word.start() if word else len(statement)].strip().rstrip("(,;: ")
    after = statement[word.start() :] if word else ""
    if not re.search("[0-9]", formula) and re.match(r"(?:is|are|equals)\b", after):
        return _expression(after.split(None, 1)[1]) if " " in after else None
    if not re.search("[0-9]", formula + after):
        return f"\\text{{{statement}}}" if re.fullmatch(r"[\w() ]+", statement) else None
    if _LIMIT.search(statement[:start]):
        return ""
    if _CONNECTIVE.match(after):
        return ""
    if not _is_formula(formula):
        return None
    return formula if _SINGLE_NUMBER.fullmatch(formula) or not re.search("[0-9]", after) else None


def _is_formula(text: str) -> bool:
    """Whether `text` is one line of mathematics without LaTeX delimiters, as in <answer>2\\sqrt{3}</answer>."""
    if not text.strip() or text.startswith("#") or _LATEX.search(text):
        return False
    return not _WORD.search(_WORDS_OF_FORMULAS.sub(" ", text))


def _without_currency(text: str) -> str:
    """`text` without dollar signs if they can't be delimiters of LaTeX, because their number is odd."""
    return re.sub(r"\$ ?(?=-?[0-9.])", "", text) if text.count("$") % 2 else text


MAX_TEXT_CHARS = 8_000
"""Without a box, only this much of the end of a completion is searched: the search is quadratic in some texts."""

_BOX = re.compile(r"\\f?boxed\s*\{")
_EQUALS = re.compile(r"^(?:\\[,;:! ]|[~\s])*(?:(?:=|≈|\\approx(?![a-zA-Z]))\s*)?")
_END = re.compile(r"(?:\\(?:[,;:! ]|$)|[.,;\s~]){1,20}$")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;&]|\\[()\[\]]|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\b[a-zA-Z]\s*=)*")
_MARKED_LINE = re.compile(r"####\s*(?![0-9]+[.):]\s)([-+$\\.0-9].*)")  # `#### 1. Plan` is a heading


def answer_section(completion: str) -> str:
    """The text after the last `</think>`, or the content of the last <answer> element in it.

    An <answer> element that is not closed extends to the end if no other one is closed.
    """
    text = completion.rpartition("</think>")[2]
    end = text.rfind("</answer>") if "</answer>" in text else len(text)
    start = text.rfind("<answer>", 0, end)
    return text[start + len("<answer>") : end] if start >= 0 else text


def final_expression(section: str) -> str:
    """The last boxes of `section`; if there is no box, the expression that its prose states, put into a box.

    Text that math-verify has to search itself is returned as it is. For prose that states no value the result is empty.
    """
    if contents := _last_boxes(section):
        return ", ".join(f"\\boxed{{{expression_of(content)}}}" for content in contents)
    text = normalized(section[-MAX_TEXT_CHARS:])
    stated = stated_expression(text)
    if stated is None:
        return text
    return f"\\boxed{{{stated}}}" if stated else ""


def stated_text(section: str) -> str:
    """The content of the last boxes, or the words that state the answer; not yet read as an expression."""
    return ", ".join(_last_boxes(section)) or statement(normalized(section[-MAX_TEXT_CHARS:]))


def expression_of(answer: str) -> str:
    """The expression of a box's content or of a reference: without its unit, a leading equals sign, a final period."""
    content = _EQUALS.sub("", _END.sub("", normalized(answer)))
    return number_with_unit(content) or content


def _last_boxes(section: str) -> list[str]:
    """The contents of the last box, and of the boxes joined to it by a comma, `and` or `or`."""
    boxes = box_contents(section)
    first = len(boxes) - 1
    while first > 0 and _BETWEEN_BOXES.fullmatch(section, boxes[first - 1][1] + 1, boxes[first][0]):
        first -= 1
    return [content for _, _, content in boxes[max(first, 0) :]]


def marked_answer(text: str) -> str | None:
    """The text after the mark `####` of GSM8K in the last line of `text`; None if the line has no mark.

    A Markdown heading of the same level is a mark only if it begins with the answer.
    """
    marked = _MARKED_LINE.fullmatch(text.rstrip().rpartition("\n")[2].strip())
    return marked[1] if marked else None


def box_contents(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each outermost \\boxed{...} in `text`; one that is not closed extends to the end."""
    boxes, position = [], 0
    while box := _BOX.search(text, position):
        position = closing_brace(text, box.end())
        boxes.append((box.start(), position, text[box.end() : position].strip()))
    return boxes


def closing_brace(text: str, start: int) -> int:
    """The index of the closing brace of a brace opened before `start`, or the length of `text`."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return len(text)
