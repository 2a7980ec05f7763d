"""Attention layers for the families whose own code computes attention: they call meshrl's, which is registered with
Transformers. Without a ContextCache they do what Transformers' layers do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.gptj.modeling_gptj import GPTJAttention

from meshrl.model.attention import NAMES, ContextCache


class GPTJContextAttention(GPTJAttention):
    implementation = "auto"

    def _attn(self, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        if ContextCache.current is None:
            return super()._attn(query, key, value, attention_mask)
        out, weights = _attend(self, query, key, value)
        return out.transpose(1, 2), weights


class FalconContextAttention(FalconAttention):
    implementation = "auto"

    def forward(
        self, hidden_states: Any, alibi: Any, attention_mask: Any, *args: Any, layer_past: Any = None, **kwargs: Any
    ) -> Any:
        if not isinstance(layer_past, ContextCache):
            kwargs["layer_past"] = layer_past
            return super().forward(hidden_states, alibi, attention_mask, *args, **kwargs)
        q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        if alibi is not None:
            raise ValueError(
                "its ALiBi position bias is not defined: Transformers' eager attention adds it twice, its SDPA once. "
                "Choose a Falcon with alibi=false"
            )
        q, k = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        layer_past.update(k, v, self.layer_idx)
        out, weights = _attend(self, q, k, v)
        return self.dense(out.flatten(2)), weights


class BloomContextAttention(BloomAttention):
    implementation = "auto"

    def forward(self, hidden_states: Any, residual: Any, *args: Any, layer_past: Any = None, **kwargs: Any) -> Any:
        if not isinstance(layer_past, ContextCache):
            kwargs["layer_past"] = layer_past
            return super().forward(hidden_states, residual, *args, **kwargs)
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        layer_past.update(k, v, self.layer_idx)
        slopes = _slopes(self.num_heads, q.device)
        out, weights = _attend(self, q, k, v, slopes=slopes)
        return self.dense(out.flatten(2)) + residual, weights


def _attend(module: Any, *qkv: torch.Tensor, **kwargs: Any) -> Any:
    return ALL_ATTENTION_FUNCTIONS[NAMES[module.implementation]](module, *qkv, None, **kwargs)


@lru_cache
def _slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """What ALiBi subtracts for each token of distance, float32[H]; with values, also in a trace without them."""
    with torch.inference_mode(False), _disable_current_modes():
        two = torch.ones(1, 2, device=device)
        return build_alibi_tensor(two, num_heads, torch.float32)[:, 0, 1]  # type: ignore[no-any-return]


def use_context_attention(lm: PreTrainedModel, implementation: str) -> None:
    """Give these layers to a model that was built with Transformers' eager attention."""
    own = {cls.__bases__[0]: cls for cls in (GPTJContextAttention, FalconContextAttention, BloomContextAttention)}
    module: Any
    for module in lm.modules():
        if type(module) in own:
            module.__class__, module.implementation = own[type(module)], implementation
    lm.config._attn_implementation = NAMES[implementation]
