"""A model and prompts for complete runs without downloads: real questions, random weights, realistic lengths.

The prompts are the 32 questions of examples/data/gsm8k. The model is that of examples/gsm8k_from_nothing.py with one
change: the probability that it ends its answer at a token gives answers as long as a trained model's. With plain random
weights every answer would reach the length limit, and continuous batching and packing would show no gain.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import torch
from measure import ROOT

DATA = ROOT / "examples" / "data" / "gsm8k" / "train.jsonl"
END_PROBABILITY = 1 / 133  # GSM8K's answers have 133 tokens on average
COMMON = 0.3  # length of the component that all embeddings share; their random part has the length 0.32


def stand_in(given_model: Path | None, given_data: Path | None, smoke: bool) -> tuple[Path, Path]:
    """(model folder, JSONL file of questions and answers): the given ones, or the stand-ins."""
    data = DATA if given_data is None else given_data
    data = data / "train.jsonl" if data.is_dir() else data
    return model_that_ends(smoke) if given_model is None else given_model, data


def model_that_ends(smoke: bool) -> Path:
    """The folder of a model of 5 M parameters (a tiny one for smoke tests) that ends its answers at random."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gsm8k_from_nothing import build
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="stand-in-"))
    build(DATA.parent, folder, **(dict(hidden_size=32, num_hidden_layers=1, intermediate_size=48) if smoke else {}))
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    set_end_probability(lm)
    lm.save_pretrained(folder)
    return folder


@torch.no_grad()
def set_end_probability(lm: torch.nn.Module) -> None:
    """Add a common direction to every embedding, so that all hidden states contain it. Then add it to the end-of-turn
    embedding until that token's mean probability is END_PROBABILITY. (The head is tied and has no bias to set.)
    """
    weight, end = lm.get_input_embeddings().weight, lm.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    torch.manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(weight.shape[1]), dim=0)
    weight += COMMON * direction
    tokens = torch.randint(3, weight.shape[0], (8, 64))
    for _ in range(20):
        logits = lm(tokens).logits[:, 8:].float()
        probability = torch.softmax(logits, -1)[..., end].mean().item()
        along = lm.base_model(tokens).last_hidden_state[:, 8:] @ direction
        weight[end] += direction * math.log(END_PROBABILITY / probability) / along.mean().clamp(min=1.0)
