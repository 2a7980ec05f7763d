"""Reward functions that are the planted part of an incident. Each process that grades imports this file."""

from __future__ import annotations

import os
import time

from tiny_run import ascii_share


def hangs_for_some(completion: str, answer: str) -> float:
    """As a parser of formulas that does not return."""
    if int(answer) % 8 == 0:
        time.sleep(3600)
    return ascii_share(completion, answer)


def dies_for_some(completion: str, answer: str) -> float:
    if int(answer) % 8 == 0:
        os._exit(3)
    return ascii_share(completion, answer)


def fails_for_some(completion: str, answer: str) -> float:
    """As a sandbox that can't be reached for 1 answer in 16, at most the share that a run accepts."""
    if len(completion) and ord(completion[0]) % 16 == 0:
        raise ConnectionError("the sandbox does not answer")
    return ascii_share(completion, answer)
