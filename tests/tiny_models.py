"""Tiny random models from configs; the same arguments give the same model in every process."""

from __future__ import annotations

from typing import Any

import torch
from model_families import config_of


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
        if p.ndim == 1:  # biases start at 0 and norms at 1, which would hide faults
            p.data += 0.1 * torch.randn_like(p)
    return widen(model) if dtype == torch.float64 else model


class WideRMSNorm(torch.nn.RMSNorm):
    """An fp64 norm. Transformers' norms compute in fp32, which alone rounds each gradient by 5e-8 of its norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """Make all of a model's arithmetic fp64, so that tests can require 1e-10 of its gradients."""
    for module in list(model.modules()):
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.double() if buffer.is_floating_point() else buffer)
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                norm = WideRMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def tiny_mixture(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A Qwen3 mixture of 4 experts, of which 2 compute each token. In fp64 its routers compute in fp64, too."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    class WideRouter(Qwen3MoeTopKRouter):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
            scores, index = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
            return logits, scores / scores.sum(-1, keepdim=True), index

    lm = tiny_lm("qwen3_moe", dtype, seed, **{"num_experts": 4, "norm_topk_prob": True, **changes})
    for module in lm.modules():
        if dtype == torch.float64 and isinstance(module, Qwen3MoeTopKRouter):
            module.__class__ = WideRouter
            lm.set_experts_implementation("eager")  # the other ones have no fp64
    return widen(lm) if dtype == torch.float64 else lm


# Families that differ in their attention or their head. tests/contract/test_model_families.py has all families.
FAMILIES = ("qwen2", "llama", "qwen3", "mistral", "gemma2", "cohere", "granite")


def tiny_lm(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A tiny model of a family, with meshrl's attention. Its weights are large enough to matter, and so are the buffers
    with the biases of routers and the scales of Gemma 4's layers."""
    from transformers import AutoModelForCausalLM

    from meshrl.model import attention

    attention.register()
    config = config_of(family, **{"initializer_range": 0.2, **changes})
    config.use_cache = False
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype).eval()
    for name, buffer in lm.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            buffer.uniform_(0.5, 0.8)
    return lm


IMAGE_TOKEN = 2


def tiny_vision_qwen2(dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.nn.Module:
    """The Qwen2 above with two inputs that text models lack: features, added at image placeholders, and recorded expert
    choices [T, L, K], added as embeddings (-1 adds nothing). It shows whether media and routes arrive in order.
    """
    from transformers.models.qwen2 import modeling_qwen2

    class VisionQwen2Model(modeling_qwen2.Qwen2Model):
        def __init__(self, config: Any):
            super().__init__(config)
            self.vision = torch.nn.Linear(5, config.hidden_size)
            self.experts = torch.nn.Embedding(8 + 1, config.hidden_size)

        def forward(self, input_ids=None, pixel_values=None, routed_experts=None, **kwargs):
            embeds = self.embed_tokens(input_ids)
            seen = torch.zeros_like(embeds)
            where = (input_ids[0] == IMAGE_TOKEN).nonzero()[:, 0]
            seen = seen.index_add(1, where, self.vision(pixel_values.to(embeds.dtype))[None])
            chosen = self.experts(routed_experts.long() + 1) * (routed_experts >= 0)[..., None]
            return super().forward(inputs_embeds=embeds + seen + chosen.sum((1, 2))[None], **kwargs)

    class VisionQwen2(modeling_qwen2.Qwen2ForCausalLM):
        replays_routing = True

        def __init__(self, config: Any):
            super().__init__(config)
            self.model = VisionQwen2Model(config)
            self.post_init()

    base = tiny_qwen2(dtype=dtype, seed=seed)
    torch.manual_seed(seed)
    model = VisionQwen2(base.config)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    with torch.no_grad():
        for module in (model.model.vision, model.model.experts):
            for p in module.parameters():
                p.normal_(0, 0.3)
    return widen(model)
