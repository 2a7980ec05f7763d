"""SmolLM2's rewards; grpo.yaml names them, and they are found next to that file."""

import re

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(completion: str, answer: str) -> float:
    """1.0 if the last number of the completion is the last one of the answer (GSM8K's end in `#### N`), else 0.0. So
    "18 - 6 coins" is wrong, although it equals 12."""
    found, want = (_NUMBER.findall(text.replace(",", "")) for text in (completion, answer))
    return float(bool(found) and float(found[-1]) == float(want[-1]))


def finished(completion: str, answer: str, stop_reason: str) -> float:
    """1.0 if the completion has a number and was not cut off, else 0.0."""
    return float(stop_reason == "stop" and _NUMBER.search(completion) is not None)
