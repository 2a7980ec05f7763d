"""The rewards of the end-to-end benchmark, as dotted paths that both trainers can import."""

from __future__ import annotations

from typing import Any

GSM8K = {
    "answer": {"kind": "meshrl.reward.math_answer:math_answer", "weight": 1.0, "args": {"rule": "gsm8k"}},
    "form": {
        "kind": "meshrl.reward.kinds:format_match",
        "weight": 0.1,
        "args": {"regex": r"(?s)(?:(?!####).)*#### -?[0-9][0-9.,]*"},
    },
}
STAND_IN = {"even": {"kind": "rewards:even_start", "weight": 1.0, "args": {}}}


def even_start(completion: str, answer: Any) -> float:
    """1.0 if the first character has an even code: a reward for random weights that does not depend on the length."""
    return 1.0 if completion and ord(completion[0]) % 2 == 0 else 0.0
