"""A model of random values, all of which matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from meshrl.model.hub_names import persistent_buffers


@torch.no_grad()
def write_random_model(config: Any, folder: Path, seed: int = 0) -> None:
    """Write a folder in fp32. Transformers' own initial values hide faults: biases are 0, scales are 1, and weights are
    so small that layers hardly matter."""
    lm: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    for p in lm.parameters():
        if p.ndim > 1:
            p.normal_(0, p.shape[-1] ** -0.5, generator=draw)
        else:
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    for buffer in persistent_buffers(lm).values():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 0.8, generator=draw)
    lm.save_pretrained(folder)
