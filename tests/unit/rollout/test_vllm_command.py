"""The command line of a vLLM server, for models and devices that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_lm

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig, VllmConfig
from meshrl.rollout.server.dialect import ServerSpec
from meshrl.rollout.vllm.dialect import _command


def command(folder: Path, family: str, device: str, *args: str) -> list[str]:
    tiny_lm(family).config.save_pretrained(folder)
    cfg = RolloutConfig(engine="vllm", vllm=VllmConfig(args=list(args)))
    model = ModelConfig(path=str(folder))
    spec = ServerSpec(model=model, rollout=cfg, device=torch.device(device), name="vllm", max_context_tokens=64)
    return _command(spec, folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "qwen2"])
def test_experts_on_a_gpu_are_computed_by_the_kernel_that_stores_their_weights_as_sent(tmp_path: Path, family: str):
    """vLLM's choice on Blackwell permutes them in place, so each read-back after a sync would fail."""
    words = command(tmp_path, family, "cuda")
    if family == "qwen2":
        assert "--moe-backend" not in words
    else:
        assert words[words.index("--moe-backend") + 1] == "triton"


def test_on_a_cpu_vllm_has_one_kernel_of_experts(tmp_path: Path):
    assert "--moe-backend" not in command(tmp_path, "mixtral", "cpu")


def test_the_users_kernel_of_experts_comes_last(tmp_path: Path):
    """Of two values, vLLM's parser takes the last."""
    words = command(tmp_path, "mixtral", "cuda", "--moe-backend=flashinfer_cutlass")
    assert words[-1] == "--moe-backend=flashinfer_cutlass"
