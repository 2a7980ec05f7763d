"""The files of an exported model can be read by the users that the umask allows, for example those of a shared disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_qwen2

from meshrl.config.model import LoraConfig
from meshrl.model.lora import save_adapter
from meshrl.model.save import save_pretrained


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_weights_have_the_mode_of_the_other_files(umask: int, tmp_path: Path):
    before = os.umask(umask)
    try:
        for _ in range(2):  # the second time, all files exist
            save_pretrained(tiny_qwen2(), torch.float32, tmp_path)
            tensors = {"q_proj.lora_A.weight": torch.ones(2, 2)}
            save_adapter(tensors, LoraConfig(), "model", tmp_path / "adapter", is_mixture=False)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert {"model.safetensors", "adapter_model.safetensors", "config.json", "adapter_config.json"} <= modes.keys()
    assert set(modes.values()) == {0o666 & ~umask}
