"""meshrl's loader in SGLang's workers, with a fault: SGLang ignores one name, as its loaders do with names that they
don't know."""

from __future__ import annotations

from typing import Any

from meshrl.rollout.sglang import loader

DROPPED = "model.layers.1.self_attn.k_proj.weight"  # a part of a fused parameter


def load(model: Any, named_tensors: list[Any]) -> None:
    load_weights = model.load_weights
    model.load_weights = lambda weights: load_weights([pair for pair in weights if pair[0] != DROPPED])
    try:
        loader.load(model, named_tensors)
    finally:
        del model.load_weights
