"""Plain values to and from text: `1e-6`, `off` or `null` mean the same in a config file and on the command line."""

from __future__ import annotations

import json
import re
from typing import Any

_DIGITS = r"(?:0|[1-9](?:_?[0-9])*)"
_INTEGER = re.compile(rf"[-+]?{_DIGITS}")
# YAML 1.1 (PyYAML) reads 1e-6 as text because it has no dot; here it is a number.
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_PLAIN = re.compile(r"[A-Za-z0-9_./~+-][A-Za-z0-9_./~+ :-]*")
_UNSAFE = re.compile("[\x7f-\xa0\u2028\u2029\ufeff]")
_CONSTANTS = {
    word: value
    for words, value in (("true yes on", True), ("false no off", False), ("null ~", None))
    for lower in words.split()
    for word in (lower, lower.capitalize(), lower.upper())
} | {"": None}


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar: null, true/yes/on, false/no/off, integer, number, else text."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text) and len(text) < 100:  # Python refuses to read integers of thousands of digits
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return text


def show(value: Any) -> str:
    """A value as YAML in one line, so that reading it back gives the same value."""
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and not re.search(r": |:$| $|^-$|^- ", value)
        if is_plain and scalar(value) == value:
            return value
        # Escapes characters that JSON leaves bare and YAML forbids or folds; no others: YAML has no surrogate pairs.
        return _UNSAFE.sub(lambda c: f"\\u{ord(c[0]):04x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(str(name))}: {show(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show(entry) for entry in value) + "]"
    return json.dumps(value)
