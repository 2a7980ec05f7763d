"""Rewards, losses and environments of the clinic's runs. Each process that grades imports this file, so it imports
little itself."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from meshrl.algo.losses import LossInputs

_LEAK = list[bytearray]()
_num_graded = 0


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def right_digits(completion: str, answer: str) -> float:
    """The share of the digits that are right: easier than `right`."""
    return sum(a == b for a, b in zip(completion, answer)) / len(answer)


def has_five_digits(completion: str, answer: str) -> float:
    return float(len(completion) == 5 and completion.isdigit())


def of_a_digit(completion: str, answer: str, digit: str) -> float:
    """A reward with a loophole: each of these digits counts, in wrong answers, too."""
    return completion.count(digit) / 5


def of_length(completion: str, answer: str, per: int) -> float:
    """A reward with a loophole: longer is better."""
    return float(completion == answer) + len(completion) / per


def constant(completion: str, answer: str, value: float) -> float:
    return value


def rarely_right(completion: str, answer: str) -> float:
    """As prompts of which nearly all are too hard."""
    return float(completion == answer and int(answer) % 32 == 0)


def fails_for_some(completion: str, answer: str, one_in: int) -> float:
    """As a judge that does not answer some requests."""
    if zlib.crc32(f"{answer} {completion}".encode()) % one_in == 0:
        raise ConnectionError("the judge does not answer")
    return float(completion == answer)


def leaks(completion: str, answer: str, kib: int) -> float:
    """A grader that retains memory of each call."""
    _LEAK.append(bytearray(b"x" * (kib << 10)))
    return float(completion == answer)


def slower(completion: str, answer: str, after: int, s: float) -> float:
    """A grader that becomes slow, as one whose cache is full."""
    global _num_graded
    _num_graded += 1
    if _num_graded > after:
        time.sleep(s)
    return float(completion == answer)


def likelier_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss without the advantages."""
    return -inputs.logprobs, {}


def no_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss that multiplies by a mask of the wrong rows."""
    return inputs.logprobs * 0.0, {}


def filtered_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss that counts only tokens whose ratio is above 1.2, which is 1 with one update a step."""
    is_used = (inputs.logprobs - inputs.old_logprobs).detach().exp() > 1.2
    return -inputs.advantages * inputs.logprobs * is_used, {}


class TwoTries:
    """A task that is asked several times."""

    def __init__(self, num_tries: int = 2) -> None:
        self.num_left = num_tries

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[None, dict[str, Any]]:
        self.question, self.answer = options["messages"][-1]["content"], options["answer"]
        return None, {}

    def step(self, action: str) -> tuple[str | None, float, bool, bool, dict[str, Any]]:
        self.num_left -= 1
        is_over = self.num_left == 0
        return None if is_over else self.question, float(action == self.answer), is_over, False, {}
