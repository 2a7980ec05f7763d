"""SmolLM2's reward; grpo.yaml names it, and it is found next to that file."""

import re


def last_number(completion: str, answer: str) -> float:
    """1.0 if the last number of the completion is the last one of the answer (GSM8K's end in `#### N`), else 0.0. So
    "18 - 6 coins" is wrong, although it equals 12."""
    found, want = (re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (completion, answer))
    return float(bool(found) and float(found[-1]) == float(want[-1]))
