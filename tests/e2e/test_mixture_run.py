"""`meshrl train` of a mixture of experts: its keys work together, and it learns."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_mixture
from tiny_run import steps_of, train, write_run

from meshrl.cli import main

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
ROUTERS = ("rollout.router_replay=true", "train.router_aux_loss_coef=0.001", "model.router_dtype=float32")


@pytest.mark.timeout(300)
def test_a_run_replays_and_balances_its_routers_and_samples_from_the_trainers_weights(tmp_path: Path):
    config = write_run(tmp_path)
    vocabulary = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    tiny_mixture(vocab_size=vocabulary, initializer_range=0.1).save_pretrained(tmp_path / "model")
    usual = ("cluster.executor=inline", "reward.terms.ascii.kind=tiny_run:no_reward")
    folder = train(config, "mixture", *ROUTERS, *usual, "model.dtype=bfloat16")
    for step in steps_of(folder, ()):
        assert step["train/no_gradient_fraction"] == 0 and step["train/grad_norm"] > 0, (
            "experts of all rows are balanced"
        )
        assert step["proof/logprob_abs_diff_mean"] < 0.01
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
        assert 0 < step["router/entropy"] <= 1.3863 and 1 <= step["router/max_load"] <= 4
    adapters = ("model.lora.enabled=true", "model.lora.targets=[all-linear, experts]", "train.optimizer.lr=0.01")
    for step in steps_of(train(config, "adapters", *ROUTERS, *usual, *adapters), ()):
        assert step["train/grad_norm"] > 0 and step["proof/logprob_abs_diff_mean"] < 1e-5
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
    narrow = train(
        config,
        "narrow",
        *usual,
        *adapters[:2],
        "train.optimizer.lr=1e-5",
        "model.dtype=bfloat16",
        "reward.terms.ascii.kind=tiny_run:length",
    )
    shares = [step.get("sync/lora_merged_share") for step in steps_of(narrow, ())]
    assert 0 < max(shares) < 0.9
    assert (narrow / "run_notes.txt").read_text().count("% of the adapters' change") == 1
    note = "the model's config.json has router_aux_loss_coef 0.001"
    assert note not in (folder / "run_notes.txt").read_text()
    again = train(config, "default", *usual, "loop.num_steps=1")
    assert [step["train/grad_norm"] for step in steps_of(again)] == [0.0]
    assert f"{note}, which is not used" in (again / "run_notes.txt").read_text()


HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 64,
}


def _doubling_mixture(folder: Path, family: str) -> None:
    """The quickstart's tokenizer and problems, and a mixture of 4 experts in place of its dense model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder.mkdir()
    task = runpy.run_path(str(QUICKSTART / "task.py"))
    task["build_tokenizer"](folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
        **(HYBRID if family == "qwen3_next" else {}),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    task["make_data"](folder, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_mixture_learns_the_quickstarts_task(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With replayed experts and the loss that balances them, on two FSDP2 ranks. One of the two layers of qwen3_next is
    a gated delta rule."""
    monkeypatch.chdir(QUICKSTART.parents[1])
    start = tmp_path / "start"
    _doubling_mixture(start, family)
    into = f"run.folder={tmp_path}"
    sft = ["sft", str(QUICKSTART / "sft.yaml"), into, f"model.path={start}", f"sft.path={start}/warmup.jsonl"]
    assert main(sft) == 0
    (warm,) = (tmp_path / "sft").glob("checkpoints/step_*/model")
    data = f"data.path={start}/train.jsonl", f"data.eval_path={start}/heldout.jsonl"
    assert main(["train", str(QUICKSTART / "grpo.yaml"), into, f"model.path={warm}", *data, *ROUTERS]) == 0
    result = json.loads((tmp_path / "grpo" / "result.json").read_text())
    before, after = result["evals"][0]["mean_at_k"], result["evals"][-1]["mean_at_k"]
    assert before <= 0.35 and after >= 0.9, (before, after)
    steps = [step for step in steps_of(tmp_path / "grpo") if "train/grad_norm" in step]
    assert len(steps) == 60
    assert max(step["proof/logprob_abs_diff_mean"] for step in steps) < 1e-4
    assert max(step["router/dead_experts"] for step in steps) == 0
