"""Reward functions as users write them, right and wrong; loaded in workers by dotted path."""

import json
import re
import time


def right(completion, answer):
    return float(completion.strip() == str(answer).strip())


def constant(completion, answer):
    return 0.5


def swapped(completion, answer):
    """The arguments in the wrong order: searches the completion in the answer."""
    return float(bool(completion) and completion not in str(answer))


def repetition(completion, answer):
    """A penalty, for a term of negative weight."""
    words = completion.split()
    return float(len(set(words)) < len(words))


def boxed(completion, answer):
    """Fails if it finds no mark."""
    return float(re.search(r"<final>(.*)</final>", completion).group(1) == answer)


def from_json(completion, answer):
    return float(json.loads(completion)["answer"] == answer)


def by_level(completion, answer, prompt):
    return prompt["meta"]["levl"] * 1.0


def misspelt(completion, answer):
    return float(normalise(completion) == answer)  # noqa: F821


def wants_text(completion, answer):
    return float(completion == answer.strip())


def sees_everything(completion, answer, prompt, messages, stop_reason, num_tokens):
    """Above 0 only for the messages and numbers of a finished trajectory."""
    ok = messages == [{"role": "assistant", "content": completion}] and stop_reason == "stop" and num_tokens > 0
    return float(ok and bool(completion) and prompt["id"].startswith("row"))


async def judge(completion, answer):
    return float(completion == answer)


def slow(completion, answer):
    time.sleep(0.3)
    return 0.0
