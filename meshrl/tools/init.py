"""`meshrl init`: a folder with everything that a first run of one's own needs, fitted to a model: with
problems, endless rows of a question and its answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from meshrl.core.device import device_count, device_type
from meshrl.core.errors import ConfigError
from meshrl.core.files import is_there, output_errors, replacing, write_text
from meshrl.data.built_in_templates import BUILT_IN
from meshrl.data.chat import CHATML_TOKENS, load_tokenizer, render
from meshrl.model.limits import limits_of, text_config
from meshrl.run.subject import find_subject

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


def doublings(seed: int) -> Iterator[Row]:
    """The problems of the quickstart, whose model reads 64 tokens and knows nothing else."""
    rng = random.Random(seed)
    for number in rng.sample(range(10_000, 50_000), k=10_000):
        yield {"question": f"2*{number}", "answer": str(2 * number)}


def jsonl(rows: list[Row]) -> str:
    """The text of a JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows)


NUM_TRAIN, NUM_HELDOUT = 200, 50


class _Task(NamedTuple):
    rows: Callable[[int], Iterator[Row]]
    max_new_tokens: int


TASKS = (_Task(word_problems, 64), _Task(doublings, 8))  # the first whose prompts and answers fit into the model

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
REWARD = '''"""The rewards of config.yaml, which names them."""

import re


def score(completion: str, answer: str) -> float:
    """1 if the last number in the model's answer is the one in the row's "answer", else 0. For answers that are texts
    return, for example, float(answer.lower() in completion.lower())."""
    numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", completion.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(answer))


def finished(completion: str, answer: str, stop_reason: str) -> float:
    """1 if the answer has a number and was not cut off, else 0."""
    return float(stop_reason == "stop" and re.search(r"\\d", completion) is not None)
'''

CONFIG = """# `meshrl config WORD` explains the keys about a word; docs/config.md lists all of them.
# Paths and modules are looked up next to this file.
model: {{path: {model}, dtype: {dtype}}}
data:
  path: train.jsonl            # one {{"question": ..., "answer": ...}} a line: your own rows, with numbers as answers
  eval_path: heldout.jsonl     # rows that are never trained on
  prompt: question
  answer: answer
  max_prompt_tokens: {max_prompt_tokens}      # rows with longer prompts are left out
  chat_template: chat_template.jinja   # how messages become text; it was {template}
reward:
  terms:                       # functions in my_reward.py
    answer: {{kind: "my_reward:score"}}
    finished: {{kind: "my_reward:finished", weight: 0.2}}
rollout: {{sampling: {{max_new_tokens: {max_new_tokens}}}}}   # longer answers are cut
loop: {{num_steps: 20, prompts_per_step: 8, samples_per_prompt: 8, eval_every_steps: 10, eval_term: answer}}
train: {{optimizer: {{lr: {lr}}}}}   # larger models need smaller ones
cluster: {{num_train_ranks: {ranks}}}
"""


def init(folder: Path, model: str) -> str:
    """Write a config, a reward function, rows and a chat template for `model`, a model's folder, a hub id or a run's
    folder, into the new folder `folder`. Returns what to do next, for a terminal."""
    if is_there(folder):
        raise ConfigError(f"{folder} already exists; give the name of a new folder")
    subject = find_subject(model)
    if subject.state is not None:
        raise ConfigError(f"{subject.text} has no model yet; write it by: meshrl convert {subject.state} OUT")
    path = str(subject.model)
    tokenizer = load_tokenizer(path)
    template, origin = tokenizer.chat_template, "the tokenizer's own"
    template = template.get("default") if isinstance(template, dict) else template
    if not template and set(CHATML_TOKENS) <= set(tokenizer.get_vocab()):
        template, origin = BUILT_IN["chatml"], "chatml, because the tokenizer has none but its tokens"
    elif not template:
        template, origin = PLAIN_TEMPLATE, "the bare text, the tokenizer has none"
    tokenizer = load_tokenizer(path, template)
    task, rows = _fitting_rows(path, tokenizer)
    files = {
        "config.yaml": _config(path, origin, task.max_new_tokens),
        "my_reward.py": REWARD,
        "train.jsonl": jsonl(rows[:NUM_TRAIN]),
        "heldout.jsonl": jsonl(rows[NUM_TRAIN:]),
        "chat_template.jinja": template,
    }
    with output_errors(folder, "Give another folder"), replacing(folder) as aside:
        aside.mkdir(parents=True)
        for name, text in files.items():
            write_text(aside / name, text)
    config = folder / "config.yaml"
    return (
        f"wrote {folder}: {', '.join(files)}\n"
        f"{NUM_TRAIN} rows to train on and {len(rows) - NUM_TRAIN} held-out ones, such as {json.dumps(rows[0])}\n"
        f"check it:  meshrl train {config} --explain\n"
        f"train:     meshrl train {config}"
    )


def _fitting_rows(path: str, tokenizer: Any) -> tuple[_Task, list[Row]]:
    """The first task of which all prompts, with the longest answers, fit into the model's context."""
    max_context_tokens, _ = limits_of(path, None)
    tokenizer.model_max_length = 1 << 30  # it would warn of the problems that are too long
    for task in TASKS:
        rows = list(islice(task.rows(0), NUM_TRAIN + NUM_HELDOUT))
        longest = max(len(render(tokenizer, [{"role": "user", "content": row["question"]}])) for row in rows)
        if longest + task.max_new_tokens <= max_context_tokens:
            return task, rows
    raise ConfigError(
        f"{path} reads {max_context_tokens} tokens (max_position_embeddings); the shortest problems need "
        f"{longest + task.max_new_tokens} with their answers. Write a config as in README, with short rows of your own"
    )


def _config(path: str, template: str, max_new_tokens: int) -> str:
    on_cpu = device_type() == "cpu"
    width = text_config(path).hidden_size
    return CONFIG.format(
        model=json.dumps(str(Path(path).resolve()) if Path(path).is_dir() else path),
        dtype="float32" if on_cpu else "bfloat16",
        template=template,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=min(1024, limits_of(path, None)[0] - max_new_tokens),
        lr="1e-3" if width <= 256 else "1e-5" if width <= 1024 else "1e-6",
        ranks=1 if on_cpu else device_count(),
    )
