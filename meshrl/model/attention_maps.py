"""Which tokens a row's tokens attend to: the weights of each layer and head, from the eager attention of Transformers,
which each family's own file computes with its windows, softcaps, grouped heads and sinks.

Letters: T tokens, H query heads, S rows and columns of a map.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from meshrl.model.parts import TEXT, blocks_of, eager_attention, parts_of

SIDE = 512  # most rows and columns of a map
MAX_VALUES = 1 << 26  # of all maps together: with many layers and heads they have fewer rows
_SINK = 1e-3  # a mean weight above this that no token gets is on an attention sink


@dataclass(frozen=True, slots=True)
class LayerMaps:
    """weights: uint8[H + 1, S, S], query before key, of each head and last of their mean: the square root of a weight,
    times 255. unshown: float[H], the mean weight of a query on its head's attention sink; None without sinks."""

    weights: np.ndarray
    unshown: np.ndarray | None


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """layers: None for one without softmax attention. block: the tokens of one row or column of a map, which has the
    largest weight between two blocks. side: S."""

    layers: list[LayerMaps | None]
    block: int
    side: int
    num_heads: int


def attention_maps(lm: Any, ids: np.ndarray, max_values: int = MAX_VALUES) -> AttentionMaps:
    """The maps of ids int32[T] under a Transformers causal LM. One layer's weights, float32[H, T, T], are in memory at
    a time."""
    num_layers, num_heads = len(blocks_of(lm, parts_of(lm)[TEXT])), int(lm.config.get_text_config().num_attention_heads)
    side = max(1, min(SIDE, math.isqrt(max_values // (num_layers * num_heads))))
    block = -(-len(ids) // side)
    layers: list[LayerMaps | None] = [None] * num_layers

    def keep(layer: int, weights: torch.Tensor) -> None:
        unshown = 1 - weights.sum(-1).mean(-1)
        every = torch.cat([weights, weights.mean(0, keepdim=True)])
        blocks = F.max_pool2d(every, block, ceil_mode=True) if block > 1 else every
        quantized = blocks.sqrt().mul_(255).round_().to(torch.uint8).numpy()
        layers[layer] = LayerMaps(quantized, unshown.numpy() if unshown.max() > _SINK else None)

    read_weights(lm, torch.from_numpy(ids.astype(np.int64)), keep)
    return AttentionMaps(layers, block, -(-len(ids) // block), num_heads)


@torch.no_grad()
def read_weights(lm: Any, tokens: torch.Tensor, use: Callable[[int, torch.Tensor], None]) -> None:
    """Call `use(layer, weights float32[H, T, T])` for each layer with softmax attention, in order. tokens: int64[T]."""
    size, read, parts = (len(tokens), len(tokens)), set[int](), parts_of(lm)

    def read_output(layer: int, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if layer not in read and isinstance(weights, torch.Tensor) and weights.dim() == 4 and weights.shape[2:] == size:
            read.add(layer)
            use(layer, weights[0].float())

    hooks = [
        module.register_forward_hook(partial(read_output, layer))
        for layer, block in enumerate(blocks_of(lm, parts[TEXT]))
        for module in block.modules()
    ]
    try:
        with eager_attention(lm, parts):
            lm.base_model(input_ids=tokens[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
