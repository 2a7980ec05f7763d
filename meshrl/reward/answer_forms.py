"""Answers that are no expressions: times, dates, ratios, choices (A to J), words; and the types of a row's answer.

math-verify would read 2:30 and 3:45 as equal quotients, two dates as equal differences, a word as a product of letters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from typing import Any

VALUE_KEYS = ("value", "answer", "target", "ground_truth")
_MAX_CHARS = 300  # a longer answer has none of these forms
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)"
)
_DAY, _YEAR = r"([0-9]{1,2})(?:st|nd|rd|th)?", r"(?:,? ([0-9]{4}))?"
_MOMENTS = tuple(  # times of day, then dates: (pattern, its groups that are year, month and day)
    (re.compile(pattern, re.IGNORECASE), groups)
    for pattern, groups in (
        (r"(?<![\w:.])([0-9]{1,2}) ?: ?([0-5][0-9])(?: ?: ?([0-5][0-9]))?(?![0-9:])(?: ?([ap])\.? ?m\b\.?)?", ()),
        (r"(?<![\w:.])([0-9]{1,2})()() ?([ap])\.? ?m\b\.?", ()),
        (r"(?<![\w/.])([0-9]{4})([-–/.])([0-9]{1,2})\2([0-9]{1,2})(?![\w/-])", (1, 3, 4)),
        (r"(?<![\w/.])([0-9]{1,2})([-–/.])([0-9]{1,2})\2([0-9]{4})(?![\w/-])", (4, 1, 3)),
        (rf"\b{_MONTH}\.?,? {_DAY}\b{_YEAR}", (3, 1, 2)),
        (rf"\b{_DAY} (?:of )?{_MONTH}\b\.?{_YEAR}", (3, 2, 1)),
    )
)
_UPRIGHT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|textit|textrm|operatorname)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"(?:\\(?:[,;:! ]|quad(?![a-zA-Z]))|[~\s])+")
_CHOICE = re.compile(  # as in: A) 5 apples; (A); A because ...; option A
    r"(?:^|\b(?i:option|choice|answer|letter)(?: is)? ?:? ?)[(\[]?([A-J])"
    r"(?:[)\]]|[.:](?!\w)|,(?! ?\(?[A-J]\b)|$| (?i:because|since|is)\b)"
)
_MORE_CHOICES = re.compile(r"(?:\b(?:or|and)|[,/]) ?(?:option )?\(?[A-J](?![\w'’])")
_WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[ ,'’.&-]+[^\W\d_]+)*")
_FORMULA_WORDS = re.compile(r"\b(?:a?(?:sin|cos|tan|cot)h?|arc\w+|log|ln|exp|inf(?:inity)?|and|or)\b|,")
_BASE = re.compile(r"[0-9A-F]+_\{?([0-9]{1,2})\}?")  # 24_5 is another number than 24_7
_QUANTITY = r"-?([0-9][0-9.,]*) ?([^\W\d_]{2,}|[dghms](?![^\W\d_]))"
_QUANTITIES = re.compile(rf"(?:\$?{_QUANTITY}\.?(?:,? and |, | |$)){{2,}}")  # 5 ft 6 in; not 2x, 3y
_NOT_AT = re.compile(  # directly before a time or date
    r"(?:\b(?:not|never|before|after|until|except)|n['’]t)(?: (?:at|by|on|the))? ?$", re.IGNORECASE
)
_NOT_IN_RATIOS = re.compile(
    r"[=<>,;|]|\b0[0-9]|\\(?:to|mapsto|in|mid|[gl]eq?|rightarrow)(?![a-zA-Z])|(?<![\\a-zA-Z])[^\W\d_]{3}"
)


def references(answer: Any) -> list[str]:
    """The accepted answers, as texts, of a row's answer: a text, a number, true or false, a list of alternatives, a
    dict with one value or with one of VALUE_KEYS, or the JSON text of a list or dict of texts.

    Raises: ValueError for an answer without such a value.
    """
    if isinstance(answer, str) and re.match(r'\s*[\[{]\s*"', answer):
        try:
            answer = json.loads(answer)
        except ValueError:
            return [str(answer)]
    if isinstance(answer, dict):
        named = [answer[key] for key in VALUE_KEYS if key in answer] or [*answer.values()]
        if len(named) == 1:
            return references(named[0])
    elif isinstance(answer, list | tuple):
        if answer:
            return [text for each in answer for text in references(each)]
    elif isinstance(answer, float) and math.isfinite(answer):
        return [format(Decimal(repr(answer)).normalize(), "f")]  # 72, not 72.0
    elif answer is not None and not isinstance(answer, float):
        return [str(answer)]
    raise ValueError(
        f"the reference {str(answer)[:80]!r} is no answer; allowed: a text, a finite number, a list of accepted "
        f"answers, a dict with one value or with one of the keys {', '.join(VALUE_KEYS)}"
    )


def equal_by_form(stated: str, reference: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Whether two answers are equal as texts, times, dates, ratios, choices or words; None = compare as expressions.

    equal: compares two LaTeX expressions; used for the quotients of ratios.
    """
    if len(stated) > _MAX_CHARS or len(reference) > _MAX_CHARS:
        return None
    got, want = _upright(stated), _upright(reference)
    if got == want:
        return True if want else None
    bases = _BASE.fullmatch(got), _BASE.fullmatch(want)
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return False
    if _QUANTITIES.fullmatch(got) or _QUANTITIES.fullmatch(want):
        return _equal_quantities(_quantities(got), _quantities(want))
    moments, wanted_moments = _moments(got), _moments(want)
    if moments and wanted_moments:
        if _is_denied(got) != _is_denied(want):
            return False
        return len(moments) == len(wanted_moments) and all(map(_is_moment, moments, wanted_moments))
    terms, wanted_terms = _terms_of_ratio(got), _terms_of_ratio(want)
    if terms and wanted_terms:
        if len(terms) != len(wanted_terms) or "0" in terms + wanted_terms:
            return terms == wanted_terms
        return all(map(equal, _quotients(terms), _quotients(wanted_terms)))
    if any(ratio and other.isdigit() for ratio, other in ((terms, want), (wanted_terms, got))):
        return False  # 4:1 is not 4
    if (
        max(len(terms), len(wanted_terms)) > 2
        or _is_only_moments(got, moments)
        or _is_only_moments(want, wanted_moments)
    ):
        return False
    if choice := re.match(r"\(?([A-J])(?:\)|[.:]?$|[.:] )", want):
        letters = [match[1] for match in _CHOICE.finditer(got)]
        if letters and (len(set(letters)) == 1 or _CHOICE.match(got)) and not _MORE_CHOICES.search(got):
            return letters[0] == choice[1]
    if _WORDS.fullmatch(got) and _WORDS.fullmatch(want):
        got, want = (re.sub(r"^(?:the|an?) ", "", text.casefold()) for text in (got, want))
        are_products = sorted(got) == sorted(want) and any([*text] == sorted(text) for text in (got, want))  # yxz, xyz
        if got == want or not (are_products or _FORMULA_WORDS.search(f"{got} {want}")):
            return got == want
    return None


def _quantities(text: str) -> list[tuple[str, str]]:
    """The numbers of a text with their units, in any order."""
    found = re.findall(_QUANTITY, text.casefold())
    return sorted((number.replace(",", "").rstrip("."), unit) for number, unit in found)


def _equal_quantities(got: list[tuple[str, str]], want: list[tuple[str, str]]) -> bool:
    """A unit may be abbreviated: the letters of ft are in feet, in this order."""
    if [number for number, _ in got] != [number for number, _ in want]:
        return False
    units = [sorted((a, b), key=len) for (_, a), (_, b) in zip(got, want, strict=True)]
    return all(re.match(".*".join(short), long) for short, long in units)


def _is_denied(text: str) -> bool:
    """Whether a time or date in `text` is not the one that is meant: before 3:45 PM."""
    starts = (match.start() for pattern, _ in _MOMENTS for match in pattern.finditer(text))
    return any(_NOT_AT.search(text[:start]) for start in starts)


def _upright(text: str) -> str:
    """`text` without LaTeX's commands for upright text and spaces, delimiters and final punctuation."""
    before = ""
    while before != text:
        before, text = text, _UPRIGHT.sub(r"\1", text)
    return _SPACE.sub(" ", text.replace("{:}", ":").replace("\\colon", ":").replace("$", "")).strip(" .,;")


def _moments(text: str) -> list[tuple[Any, ...]]:
    """(year or None, month, day) and (hour, minute, second, a or p or "") of each date and time of day in `text`."""
    found: list[tuple[Any, ...]] = []
    for pattern, groups in _MOMENTS:
        for match in pattern.finditer(text):
            if not groups:
                hour, minute, second = (int(match[group] or 0) for group in (1, 2, 3))
                found += [(hour, minute, second, (match[4] or "").lower())] if hour <= 24 else []
                continue
            year, month, day = (match[group] for group in groups)
            m, d = int(month) if month.isdigit() else 1 + _MONTHS.index(month[:3].lower()), int(day)
            m, d = (d, m) if m > 12 and groups == (4, 1, 3) else (m, d)  # 16/3/2024; 3/4/2024 is of March
            found += [(year and int(year), m, d)] if 1 <= m <= 12 and 1 <= d <= 31 else []
    return found


def _is_only_moments(text: str, moments: list[tuple[Any, ...]]) -> bool:
    """Whether all numbers in `text` belong to dates and to times with minutes: 5 PM may be read as 5."""
    for pattern, _ in _MOMENTS:
        text = pattern.sub(lambda match: "" if len(match[0]) > 5 or ":" in match[0] else match[0], text)
    return bool(moments) and not re.search("[0-9]", text)


def _is_moment(got: tuple[Any, ...], want: tuple[Any, ...]) -> bool:
    """Whether an answer is this date or time of day. It may add a year or the half of the day; without a half, its hour
    is one of 24."""
    if len(got) != len(want) or len(got) == 3:
        return got[1:] == want[1:] and want[0] in (None, got[0])
    hours = {got[0] % 12 + 12 * (got[3] == "p")} if got[3] else {got[0]}
    hours |= set() if want[3] else {got[0]}
    return got[1:3] == want[1:3] and (want[0] % 12 + 12 * (want[3] == "p") if want[3] else want[0]) in hours


def _terms_of_ratio(text: str) -> list[str]:
    """The terms of the ratio that `text` is, such as 1, 2, 3 of 1:2:3; empty if it is none."""
    terms = [term.strip() for term in text.split(":")]
    balanced = all(term and all(term.count(a) == term.count(b) for a, b in ("{}", "()", "[]")) for term in terms)
    return terms if len(terms) > 1 and balanced and not _NOT_IN_RATIOS.search(text) else []


def _quotients(terms: list[str]) -> list[str]:
    return [f"\\boxed{{\\frac{{{first}}}{{{second}}}}}" for first, second in pairwise(terms)]
