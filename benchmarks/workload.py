"""The workload of the benchmarks: models by size, GSM8K's lengths, and training samples of those lengths."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshrl.core.types import Sample
from meshrl.train.batch_plan import make_batch_plan

VOCAB = 2048
# name (parameters, including the tied embeddings) -> fields of Qwen2Config
SHAPES: dict[str, dict[str, int]] = {
    "smoke": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64),
    "0.9M": dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=416),
    "5M": dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=8, intermediate_size=768),
    "28M": dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=1664),
    "54M": dict(hidden_size=512, num_hidden_layers=16, num_attention_heads=8, intermediate_size=1664),
    "134M": dict(hidden_size=768, num_hidden_layers=15, num_attention_heads=12, intermediate_size=3072),
}


def model_folder(given: Path | None, shape: str) -> Path:
    """The given folder, or a new one with random weights of that shape."""
    if given is not None:
        return given
    from transformers import Qwen2Config, Qwen2ForCausalLM

    facts = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        num_key_value_heads=facts["num_attention_heads"] // 2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **facts,
    )
    folder = Path(tempfile.mkdtemp(prefix=f"model-{shape}-"))
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """The lengths of one prompt and of the answers to it, in tokens."""

    prompt: int
    answers: tuple[int, ...]


def gsm8k_groups(num_groups: int, samples: int, seed: int, scale: float = 1.0) -> list[GroupLengths]:
    """Groups drawn from gsm8k_lengths.json, each length times `scale` (at least 2 tokens)."""
    known = json.loads(Path(__file__).with_name("gsm8k_lengths.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng(seed)
    size = len(known["prompt_tokens"])
    picked = rng.choice(size, num_groups, replace=num_groups > size)

    def scaled(n: int) -> int:
        return max(2, round(n * scale))

    return [
        GroupLengths(scaled(known["prompt_tokens"][i]), tuple(scaled(n) for n in known["answer_tokens"][i][:samples]))
        for i in picked
    ]


def training_samples(groups: list[GroupLengths], seed: int) -> list[Sample]:
    """Rows as after flatten, assign_advantages and assign_loss_weights: random tokens and advantages; answers are
    trained; each trained token has the loss weight 1 / (number of trained tokens)."""
    rng = np.random.default_rng(seed)
    total = sum(n for group in groups for n in group.answers)
    out = []
    for g, group in enumerate(groups):
        prompt = rng.integers(3, VOCAB, group.prompt)
        for k, n in enumerate(group.answers):
            tokens = np.concatenate([prompt, rng.integers(3, VOCAB, n)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= group.prompt
            advantage = rng.standard_normal()
            out.append(
                Sample(
                    trajectory_id=f"{g}/{k}",
                    group_id=str(g),
                    row=0,
                    prefix_len=group.prompt,
                    tokens=tokens,
                    mask=mask,
                    turn=np.where(mask, 0, -1).astype(np.int16),
                    rollout_logprobs=np.where(mask, -7.6, np.nan).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    rewards=np.zeros(len(tokens), np.float32),
                    advantages=np.where(mask, advantage, 0).astype(np.float32),
                    loss_weight=np.where(mask, 1 / total, 0).astype(np.float32),
                )
            )
    return out


def micro_batches(i: int, smoke: bool, num_data: int = 1) -> tuple[list[Sample], list[list[list[int]]]]:
    """The samples of round i, 32 rows (4 groups of 8), and for each data index the rows of its two micro-batches; every
    call returns the same."""
    groups = gsm8k_groups(2 if smoke else 4, 8, seed=200 + i, scale=0.1 if smoke else 1.0)
    samples = training_samples(groups, seed=200 + i)
    numbers, prefixes = [int(s.group_id) for s in samples], [s.prefix_len for s in samples]
    share = -(-sum(len(s) for s in samples) // (2 * num_data))
    batch_plan = make_batch_plan([len(s) for s in samples], num_data, share, numbers, prefixes)
    return samples, batch_plan.micro_batches


def trained_tokens(samples: list[Sample]) -> int:
    """The number of tokens with a loss, i.e. of the answers."""
    return sum(int(s.mask.sum()) for s in samples)


def start_single_rank(threads: int) -> Any:
    """A process group of one rank in this process, and its mesh, for which the engine does not use FSDP2."""
    import torch.distributed as dist

    from meshrl.core.device import keep_freed_memory
    from meshrl.parallel.mesh import build_mesh

    torch.set_num_threads(threads)
    keep_freed_memory(torch.device("cpu"))  # as a rank does
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return build_mesh((1, 1, 1, 1), "cpu")
