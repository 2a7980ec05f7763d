"""A model of linear attention and softmax attention learns the quickstart's task by GRPO, from random weights."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


def write_start(folder: Path) -> None:
    """The quickstart's tokenizer and problems, and a Qwen3-Next of its width."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    task = runpy.run_path(str(FOLDER / "task.py"))
    folder.mkdir()
    tokenizer = task["build_tokenizer"](folder)
    config = Qwen3NextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3NextForCausalLM(config).save_pretrained(folder)
    task["make_data"](folder, 0)


def meshrl(command: str, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Run it with the quickstart's config; returns the metrics of its steps."""
    arguments = [command, str(FOLDER / f"{'grpo' if command == 'train' else command}.yaml"), f"run.folder={folder}"]
    call = [sys.executable, "-m", "meshrl", *arguments, "run.name=" + command, *settings]
    done = subprocess.run(call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    lines = (folder / command / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hybrid_learns_by_grpo_what_its_demonstrations_get_wrong(tmp_path: Path) -> None:
    """On two FSDP2 ranks, with the embedded sampler."""
    start = tmp_path / "start"
    write_start(start)
    meshrl("sft", tmp_path, f"model.path={start}", f"sft.path={start}/warmup.jsonl")
    (warm,) = (tmp_path / "sft").glob("checkpoints/step_*/model")
    data = [f"data.path={start}/train.jsonl", f"data.eval_path={start}/heldout.jsonl"]
    steps = meshrl("train", tmp_path, f"model.path={warm}", *data)
    print([step.get("reward/mean") for step in steps])
