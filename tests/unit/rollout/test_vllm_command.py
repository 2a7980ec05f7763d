"""The command line of a vLLM server, for models and devices that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_lm
from vision_families import config_of as vision_config

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig, VllmConfig
from meshrl.rollout.server.dialect import ServerSpec
from meshrl.rollout.vllm.dialect import _command


def command(folder: Path, family: str, device: str, *args: str) -> list[str]:
    tiny_lm(family).config.save_pretrained(folder)
    return _command(spec_of(folder, device, *args), folder)


def spec_of(folder: Path, device: str, *args: str) -> ServerSpec:
    cfg = RolloutConfig(engine="vllm", vllm=VllmConfig(args=list(args)))
    model = ModelConfig(path=str(folder))
    return ServerSpec(model=model, rollout=cfg, device=torch.device(device), name="vllm", max_context_tokens=64)


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


def test_a_model_with_a_tower_gets_processed_pixels_and_a_tokenizer(tmp_path: Path):
    """vLLM would normalize the pixels again, and refuses its classes with a tower without a tokenizer."""
    vision_config("qwen2_vl").save_pretrained(tmp_path)
    words = _command(spec_of(tmp_path, "cpu"), tmp_path)
    assert "--no-mm-device-do-normalize" in words and "--skip-tokenizer-init" not in words
    words = command(tmp_path, "qwen2", "cpu")
    assert "--no-mm-device-do-normalize" not in words and "--skip-tokenizer-init" in words
