"""The task of the schedule benchmarks: count down from a number. The prompt decides how long the right answer is.

"12>" -> "12 11 10 9 8 7 6 5 4 3 2 1". 5 % of the prompts ask for an answer that is ten times as long as the median.
A tiny Qwen2 model is warmed up on demonstrations that contain mistakes; RL rewards the fraction of the answer that is
right, so it learns to count without them.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from workload import SHAPES

ROOT = Path(__file__).resolve().parents[1]
MEDIAN, LONG = 9, 68  # numbers to count: about 20 and 200 tokens
SHARE_OF_LONG = 0.05
SHARE_OF_MISTAKES = 0.06  # of the numbers in demonstrations
MAX_NEW_TOKENS = 256


def right_answer(start: int) -> str:
    return " ".join(str(i) for i in range(start, 0, -1))


def reward(completion: str, answer: str) -> float:
    """The fraction of the numbers that are right and at the right place, from the start to the first mistake."""
    expected, found = answer.split(), completion.split()
    right = next((i for i, (a, b) in enumerate(zip(expected, found)) if a != b), min(len(expected), len(found)))
    return right / max(len(expected), len(found))


def _start(rng: random.Random) -> int:
    middle = LONG if rng.random() < SHARE_OF_LONG else MEDIAN
    return rng.randint(middle - middle // 6, middle + middle // 6)


def _demonstration(rng: random.Random, start: int) -> str:
    numbers = range(start, 0, -1)
    return " ".join(str(rng.randint(1, start) if rng.random() < SHARE_OF_MISTAKES else i) for i in numbers)


def rows(num: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"question": f"{n}>", "answer": right_answer(n)} for n in (_start(rng) for _ in range(num))]


def warm_model(folder: Path, shape: str, num_steps: int, quiet: bool = True) -> Path:
    """Write tokenizer and model of this shape to `folder`, and train it on demonstrations. Returns the model's path."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import meshrl

    sys.path.insert(0, str(ROOT))
    from examples.quickstart.task import build_tokenizer

    start = folder / "start"
    start.mkdir(parents=True)
    tokenizer = build_tokenizer(start)
    facts: dict[str, Any] = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=facts["num_attention_heads"] // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
        **facts,
    )
    Qwen2ForCausalLM(config).save_pretrained(start)
    rng = random.Random(0)
    starts = [_start(rng) for _ in range(8000)]
    demonstrations = [
        {"messages": [{"role": "user", "content": f"{n}>"}, {"role": "assistant", "content": _demonstration(rng, n)}]}
        for n in starts
    ]
    settings = {
        "model": {"path": str(start), "dtype": "float32"},
        "train": {
            "activation_checkpointing": False,
            "optimizer": {"lr": 3e-3},
            "scheduler": {"kind": "cosine", "warmup_steps": num_steps // 25, "min_lr_ratio": 0.1},
        },
        "sft": {"num_steps": num_steps, "rows_per_step": 48, "max_row_tokens": 400},
        "cluster": {"num_train_ranks": 2},
        "run": {"folder": str(folder), "name": "sft"},
    }
    run = meshrl.sft(settings, data=demonstrations, quiet=quiet)
    return Path(run.summary["model"])


def settings(model: Path, folder: Path, name: str, num_steps: int, **loop: Any) -> dict[str, Any]:
    """The config of a run on the task. loop: keys of loop.*."""
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "train": {"activation_checkpointing": False, "optimizer": {"lr": 3e-4}},
        "rollout": {"sampling": {"max_new_tokens": MAX_NEW_TOKENS}, "max_running_requests": 512},
        "data": {"max_prompt_tokens": 32},
        "loop": {"num_steps": num_steps, "eval_every_steps": 0, **loop},
        "run": {"folder": str(folder), "name": name},
    }
