"""Word problems of one step, for examples and tests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

Row = dict[str, str]
NAMES = ("Ada", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps", "shells", "cards", "cookies", "stickers")
STORIES = (  # text, operation
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", "+"),
    ("{name} finds {a} {things} on Monday and {b} on Tuesday. How many {things} is that in total?", "+"),
    ("There are {a} {things} on one table and {b} on another. How many {things} are there together?", "+"),
    ("{name} has {a} {things} and gives {b} of them away. How many {things} are left?", "-"),
    ("{name} had {a} {things} and lost {b}. How many {things} does {name} still have?", "-"),
    ("A box had {a} {things}. {name} took out {b}. How many {things} remain in the box?", "-"),
    ("{name} fills {a} bags with {b} {things} each. How many {things} does {name} need?", "*"),
    ("There are {a} rows of {b} {things}. How many {things} are there?", "*"),
    ("{name} buys {a} {things} for {b} dollars each. How many dollars does {name} pay?", "*"),
)


def word_problems(seed: int) -> Iterator[Row]:
    """Endless word problems of one addition, subtraction or multiplication, no two with the same text."""
    rng, seen = random.Random(seed), set[str]()
    while True:
        story, sign = rng.choice(STORIES)
        if sign == "*":
            a, b = rng.randint(2, 9), rng.randint(2, 9)
        else:
            a, b = sorted((rng.randint(2, 20), rng.randint(2, 20)), reverse=True)
        text = story.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
        if text not in seen:
            seen.add(text)
            yield {"question": text, "answer": str({"+": a + b, "-": a - b, "*": a * b}[sign])}


def jsonl(rows: list[Row]) -> str:
    """The text of a JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows)
