"""Bytes of a model's tensors in a run, from its config.json alone: no weights are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.model.facts import as_config_error
from meshrl.model.flops import attention_module, head_sizes
from meshrl.model.limits import text_config
from meshrl.model.lora import add_adapters
from meshrl.model.recipe import DTYPES, cast_parameters
from meshrl.model.tensor_parallel import cut_model
from meshrl.parallel.exchange import Axis
from meshrl.parallel.tp import TensorParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMemory:
    """Bytes. weights: of the full model in its compute dtype. masters, gradients, moments, reference: of the train rank
    with the largest shards. token: of the keys and values of a token; None if they are not those of softmax attention.
    """

    weights: int
    masters: int
    gradients: int
    moments: int
    reference: int
    token: int | None


def model_memory(cfg: ModelConfig, train: TrainConfig, num_train_ranks: int) -> ModelMemory:
    """Raises: ConfigError."""
    from transformers import AutoModelForCausalLM

    attention.register()
    text, compute, masters = text_config(cfg.path), DTYPES[cfg.dtype], DTYPES[train.master_dtype]
    name = "eager" if text.model_type in attention.OWN_CODE else attention.NAME
    with as_config_error(cfg.path, ImportError), torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(text, attn_implementation=name, dtype=compute, trust_remote_code=False)
    model = CausalModel(lm)
    _, num_shards, num_ulysses, num_tp = train.mesh_shape(num_train_ranks)
    num_shards *= num_ulysses
    weights, token = _num_bytes(model.parameters(), 1), token_bytes(model, compute)
    if cfg.lora.enabled:
        add_adapters(lm, cfg.lora, masters, cfg.path)
    else:
        cast_parameters(lm, masters)
    if num_tp > 1:
        cut_model(model, TensorParallel(Axis(num_tp, 0, None)))
    own = sum(ceil(p.shape[0] / num_shards) * p[0].numel() for p in model.parameters())
    gradients = _num_bytes((p for p in model.parameters() if p.requires_grad), num_shards)
    return ModelMemory(
        weights=weights,
        masters=_num_bytes(model.parameters(), num_shards),
        gradients=gradients,
        moments=2 * gradients,
        reference=0 if cfg.lora.enabled else own * compute.itemsize,  # with LoRA, the policy without adapters
        token=token,
    )


def _num_bytes(parameters: Iterable[torch.nn.Parameter], num_shards: int) -> int:
    """Of the largest shards: FSDP2 cuts the first dim into equal parts, of which the last ones may be smaller."""
    return sum(ceil(p.shape[0] / num_shards) * p[0].numel() * p.element_size() for p in parameters)


def token_bytes(model: CausalModel, dtype: torch.dtype) -> int | None:
    """Bytes of the keys and values of a token in all layers; None if they are not those of softmax attention."""
    text, sizes = model.lm.config.get_text_config(), []
    for block in model.layers:
        own = attention_module(block)
        if own is None or model.has_states:
            return None
        sizes.append(sum(head_sizes(own)))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads * sum(sizes) * dtype.itemsize
