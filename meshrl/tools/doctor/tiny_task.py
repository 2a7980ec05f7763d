"""The smallest run: a random model with a tokenizer of bytes, rows, and a config with one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging

from meshrl.data.built_in_templates import BUILT_IN
from meshrl.tools.model_check.small_model import write_random_model


def write_task(folder: Path, num_ranks: int) -> Path:
    """Write model, rows and config.yaml; returns the config's path."""
    logging.disable_progress_bar()
    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = {text: number for number, text in enumerate([*ends, *sorted(bytes_to_unicode().values())])}
    tokenizer = Qwen2Tokenizer(vocab=words, merges=[], pad_token=ends[0], eos_token=ends[2])
    tokenizer.chat_template = BUILT_IN["chatml"]
    tokenizer.save_pretrained(folder / "model")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"max_position_embeddings": 256, "bos_token_id": None}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2, "pad_token_id": 0}
    config = Qwen2Config(vocab_size=len(words), **sizes, **heads)
    write_random_model(config, folder / "model")
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"path": "model", "dtype": "float32"},
        "rollout": {"sampling": {"max_new_tokens": 8}},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 64},
        "reward": {"terms": {"digits": {"kind": "format", "args": {"regex": "[a-z]", "where": "anywhere"}}}},
        "loop": {"num_steps": 1, "prompts_per_step": 2, "samples_per_prompt": 8, "save_every_steps": 0},
        "cluster": {"num_train_ranks": num_ranks},
        "run": {"folder": str(folder / "runs")},
    }
    (folder / "config.yaml").write_text(json.dumps(settings))
    return folder / "config.yaml"
