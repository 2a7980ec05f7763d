"""The reward for the form of a completion: 1.0 or 0.0, by a regular expression."""

from __future__ import annotations

import re
from typing import Any


def format_match(completion: str, answer: Any, *, regex: str, where: str = "full") -> float:
    """1.0 when the stripped completion matches `regex`, else 0.0. The reference answer is not used.

    regex: Python syntax; begin with (?s) if `.` should also match line breaks.
    where: `full` = from the first to the last character, `anywhere` = some part of it.

    Example: format_match("<think>2+2</think> 4", None, regex="(?s)<think>.*</think> [0-9]+") is 1.0.

    Raises: ValueError for an invalid `regex` or `where`.
    """
    if where not in ("full", "anywhere"):
        raise ValueError(f"where is {where!r}; allowed: full, anywhere")
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise ValueError(f"regex {regex!r} is not valid: {error}") from error
    text = completion.strip()
    return 1.0 if (pattern.fullmatch(text) if where == "full" else pattern.search(text)) else 0.0
