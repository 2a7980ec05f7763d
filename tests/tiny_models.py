"""Tiny random models from configs, the same for every process that asks with the same arguments."""

from __future__ import annotations

from typing import Any

import torch


def tiny_qwen2(dtype: torch.dtype = torch.float32, tie: bool = True, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A Qwen2 of 2 layers, hidden 32, vocabulary 64, with meshrl's attention. Weights large enough to matter."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from meshrl.model import attention

    attention.register()
    facts: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        initializer_range=0.2,
    )
    config = Qwen2Config(**{**facts, **changes})
    config._attn_implementation = attention.NAME
    config.use_cache = False
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    for p in model.parameters():
        p.data = p.data.to(dtype)
        if p.ndim == 1:  # biases start at 0 and norms at 1; random ones show more
            p.data += 0.1 * torch.randn_like(p)
    if dtype == torch.float64:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.double())
    return model
