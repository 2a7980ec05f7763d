"""Makes gsm8k_lengths.json: the lengths of GSM8K's prompts and of a small model's answers, in tokens.

    python benchmarks/gsm8k_lengths.py --model MODEL --data train.jsonl

The file is in the repository, so that every benchmark has real lengths without a download. The embedded engine samples
the answers at temperature 1 (they are not the reference solutions), 8 for each prompt, because answers to one question
have more similar lengths than answers to different questions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from meshrl.config.data import DataConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.types import Prompt, Request, SamplingParams, turn_seed
from meshrl.data.chat import load_tokenizer, stop_token_ids
from meshrl.data.datasets import PromptMaker, load_prompts
from meshrl.rollout.embedded.engine import build_embedded_engine

FILE = Path(__file__).with_suffix(".json")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="folder of a model that has learned to answer")
    p.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    p.add_argument("--prompts", type=int, default=64, help="questions, evenly spaced over the file (default 64)")
    p.add_argument("--samples", type=int, default=8, help="answers to each (default 8)")
    p.add_argument("--limit", type=int, default=256, help="longest answer (default 256)")
    args = p.parse_args()
    tokenizer = load_tokenizer(args.model)
    cfg = DataConfig(path=str(args.data), max_prompt_tokens=1024)
    prompts, _ = load_prompts(args.data, PromptMaker(cfg, tokenizer))
    picked = prompts[:: len(prompts) // args.prompts][: args.prompts]
    answers = sample_lengths(args.model, picked, args.samples, args.limit, stop_token_ids(tokenizer, args.model))
    facts = {
        "what": f"tokens of GSM8K training questions in ChatML, and of {args.samples} answers to each: sampled at "
        f"temperature 1, at most {args.limit} tokens, by a Qwen2 of 5.2 M parameters with a vocabulary of 2,048 that "
        "was warmed up on the training split",
        "prompt_tokens": [len(prompt.ids) for prompt in picked],
        "answer_tokens": answers,
    }
    rows = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    lengths = [n for group in answers for n in group]
    print(f"{FILE}: {len(lengths)} answers, {sum(lengths) / len(lengths):.1f} tokens on average")


def sample_lengths(
    model: Path, prompts: list[Prompt], samples: int, limit: int, stops: tuple[int, ...]
) -> list[list[int]]:
    """Lengths of `samples` answers to each prompt."""
    cfg = ModelConfig(path=str(model), dtype="float32")
    engine: Any = build_embedded_engine(cfg, RolloutConfig(), torch.device("cpu"), "lengths", stops)
    engine.trust_loaded_weights()
    for i, prompt in enumerate(prompts):
        for k in range(samples):
            engine.submit(
                Request(
                    id=f"{i}/{k}",
                    context_ids=prompt.ids,
                    sampling=SamplingParams(stop_token_ids=stops),
                    seed=turn_seed(0, i, k, 0),
                    max_new_tokens=limit,
                )
            )
    found = [[0] * samples for _ in prompts]
    while engine.has_work:
        for name, turn in engine.step():
            i, k = map(int, name.split("/"))
            found[i][k] = len(turn.output_ids)
    return found


if __name__ == "__main__":
    main()
