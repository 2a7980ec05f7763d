"""The parts of a model: the language model, its head, each tower and its projector. What is done by block or by part
(FSDP's groups, checkpointing, LoRA's targets, the comparison with Transformers, FLOPs and bytes) reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.model.attention import NAMES, OWN_CODE

TEXT, HEAD = "text", "head"


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of a Transformers model, by names of its modules, so that it holds for each copy of the model.

    module: the part's own. blocks: of the ModuleList with its blocks; None = it has none. attention: the name of the
    attention of its layers that meshrl computes; None = Transformers' own, or none.

    Example: {"text": ModelPart("model", "model.layers", "meshrl"), "head": ModelPart("lm_head")}
    """

    module: str
    blocks: str | None = None
    attention: str | None = None


Parts = Mapping[str, ModelPart]


def text_attention(model_type: str, implementation: str = "auto") -> str:
    """The name with which Transformers builds the text for a value of model.attn_implementation."""
    return "eager" if model_type in OWN_CODE else NAMES[implementation]  # own_attention.py replaces eager layers


def parts_of(lm: Any) -> dict[str, ModelPart]:
    """By name, towers and projectors by that of their module; each module of the model that is in no other part belongs
    to the text."""
    text, decoder, head = lm.config.get_text_config(), lm.get_decoder(), lm.get_output_embeddings()
    decoder = lm.base_model if decoder is head else decoder  # ModernBertDecoder's attribute `decoder` is its head
    names = {id(module): name for name, module in lm.named_modules()}
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = next((each for each in lists if len(each) == text.num_hidden_layers), None)
    if blocks is None:
        raise ConfigError(
            f"{type(lm).__name__} has no ModuleList of {text.num_hidden_layers} blocks (num_hidden_layers), by which "
            "meshrl shards, trains and samples. Choose another model"
        )
    parts = {
        TEXT: ModelPart(names[id(decoder)], names[id(blocks)], text._attn_implementation),
        HEAD: ModelPart(names[id(head)]),
    }
    if (vision := getattr(lm.config, "vision_config", None)) is None:
        return parts
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers  # Qwen's towers may have both
    for name, module in lm.base_model.named_children():
        if module is not decoder:
            lists = [each for each in module.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == depth]
            parts[name] = ModelPart(names[id(module)], names[id(lists[0])] if lists else None)
    return parts


def is_vision(name: str, parts: Parts) -> bool:
    """Whether the module of this name is in a tower or its projector."""
    return part_of(name, parts) not in (TEXT, HEAD)


def blocks_of(lm: torch.nn.Module, part: ModelPart) -> torch.nn.ModuleList:
    blocks: Any = torch.nn.ModuleList() if part.blocks is None else lm.get_submodule(part.blocks)
    return blocks  # type: ignore[no-any-return]


def part_of(name: str, parts: Parts) -> str:
    """The part that the module of this name belongs to."""
    others = (other for other, part in parts.items() if other != TEXT and f"{name}.".startswith(f"{part.module}."))
    return next(others, TEXT)


@contextmanager
def eager_attention(lm: Any, parts: Parts) -> Iterator[None]:
    """A context in which all parts compute attention as Transformers' own file of the family does."""
    computing = [(lm.get_submodule(part.module).config, part.attention) for part in parts.values() if part.attention]
    try:
        for config, _ in computing:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, name in computing:
            config._attn_implementation = name
