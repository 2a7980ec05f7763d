"""The rewards of the end-to-end benchmark, as dotted paths that both trainers can import."""

from __future__ import annotations

from typing import Any

GSM8K = {
    "answer": {"kind": "meshrl.reward.math_answer:math_answer", "weight": 1.0, "args": {"rule": "gsm8k"}},
    "form": {
        "kind": "meshrl.reward.format:format_match",
        "weight": 0.1,
        "args": {"regex": r"(?s)(?:(?!####).)*#### -?[0-9][0-9.,]*"},
    },
}
STAND_IN = {"brief": {"kind": "rewards:brief", "weight": 1.0, "args": {}}}


def brief(completion: str, answer: Any) -> float:
    """1.0 for fewer than 300 characters: a reward that a model with random weights can learn."""
    return 1.0 if len(completion) < 300 else 0.0
