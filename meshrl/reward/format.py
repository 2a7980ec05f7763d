"""Rewards that do not depend on the answer: for the form of a completion, by a regular expression, and its length."""

from __future__ import annotations

import re
from typing import Any

MAX_TOKENS = 1 << 20  # a completion of max_tokens is made at the start, to test the penalty


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


def overlong(completion: str, answer: Any, *, num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft punishment of long completions, -1.0 to 0.0: 0.0 up to max_tokens - buffer_tokens, then lower by
    1 / buffer_tokens for each token, and -1.0 from max_tokens on.

    num_tokens: of all turns of the trajectory. max_tokens: in most cases rollout.sampling.max_new_tokens.

    Raises: ValueError unless 1 <= buffer_tokens <= max_tokens <= MAX_TOKENS.
    Source: Yu et al. 2025 (DAPO), equation 13.
    """
    for name, value in {"max_tokens": max_tokens, "buffer_tokens": buffer_tokens}.items():
        if type(value) is not int or not 1 <= value <= MAX_TOKENS:
            raise ValueError(f"{name} is {value!r}; it must be an integer from 1 to {MAX_TOKENS}")
    if buffer_tokens > max_tokens:
        raise ValueError(f"buffer_tokens is {buffer_tokens}; it must be at most max_tokens = {max_tokens}")
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - num_tokens) / buffer_tokens))
