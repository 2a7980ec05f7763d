"""A model and prompts for whole runs on a machine that has neither: real questions, random weights, lengths like real.

The 32 questions of examples/data/gsm8k, and the model of examples/gsm8k_from_nothing.py with one change: at each token
it ends its answer with the probability that makes answers as long as a trained model's. Weights that know nothing
would fill every answer to the limit, and so hide what continuous batching and packing are for.
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
COMMON = 0.3  # length of the direction that all embeddings share; 0.32 is the length of their random part


def stand_in(given_model: Path | None, given_data: Path | None, smoke: bool) -> tuple[Path, Path]:
    """(model folder, JSONL file of questions and answers), made where they are not given."""
    data = DATA if given_data is None else given_data
    data = data / "train.jsonl" if data.is_dir() else data
    return model_that_ends(smoke) if given_model is None else given_model, data


def model_that_ends(smoke: bool) -> Path:
    """The folder of a model of 5 M parameters (a tiny one for smoke tests) that ends answers now and then."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gsm8k_from_nothing import build
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="stand-in-"))
    build(DATA.parent, folder, **(dict(hidden_size=32, num_hidden_layers=1, intermediate_size=48) if smoke else {}))
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    let_it_end(lm)
    lm.save_pretrained(folder)
    return folder


@torch.no_grad()
def let_it_end(lm: torch.nn.Module) -> None:
    """Give every embedding a common direction, which then stands in all hidden states, and the end of a turn so much
    more of it that its probability is END_PROBABILITY on average. (The head is the embedding, it has no bias to set.)
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
