"""The first layers of a model, as a folder: with its own values, or with random ones, all of which matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from meshrl.model.facts import as_config_error, model_facts, require_config, unfilled
from meshrl.model.folder import INDEX, SINGLE, require_known_tower
from meshrl.model.hub_names import persistent_buffers
from meshrl.model.images import MEDIA_IDS
from meshrl.model.limits import import_plugins
from meshrl.model.parts import TEXT, blocks_of, parts_of

MIN_LAYERS = 2
MAX_RANDOM_VOCABULARY = 1024


def write_first_layers(model: str, folder: Path) -> str:
    """Write the layers up to the first one of the last kind, at least MIN_LAYERS, in fp32. Returns a description.

    model: a model's folder, or a hub id, of which only config.json is fetched. Where there are no weights, they are
    random, and the vocabulary is small.
    """
    import_plugins()
    require_config(model)
    with as_config_error(model, ImportError, OSError, RuntimeError):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        require_known_tower(model, config.to_dict())
        has_weights = any((Path(model) / name).is_file() for name in (SINGLE, INDEX))
        num_layers, first = _first_layers(config, config.get_text_config().vocab_size if has_weights else None)
        if has_weights:
            values = model_facts(model).weights
            lm = unfilled(first, "eager")
            values.fill(lm)
            lm.save_pretrained(folder)
        else:
            write_random_model(first, folder)
    shown = first.get_text_config().num_hidden_layers
    origin = "its own values" if has_weights else "random values, since only its config.json was read"
    return f"{model} is a {config.model_type}; {shown} of its {num_layers} layers are checked, with {origin}"


def _first_layers(config: Any, vocab_size: int | None) -> tuple[int, Any]:
    """The number of layers, and a config with the first of them. vocab_size: None = at most MAX_RANDOM_VOCABULARY."""
    with torch.device("meta"):
        lm = unfilled(config, "eager")
    layers, text = blocks_of(lm, parts_of(lm)[TEXT]), config.get_text_config()
    fields, total = config.to_dict(), len(layers)
    inner = fields["text_config"] if text is not config and "text_config" in fields else fields
    lists = {key: value for key, value in inner.items() if isinstance(value, list | tuple) and len(value) == total}
    kinds = [
        repr(([(name, p.shape) for name, p in layer.named_parameters()], [value[i] for value in lists.values()]))
        for i, layer in enumerate(layers)
    ]
    count = min(total, max([MIN_LAYERS, *(1 + kinds.index(kind) for kind in kinds)]))
    inner |= {key: value[:count] for key, value in lists.items()}
    inner[text.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = count
    inner["vocab_size"] = vocab_size or min(text.vocab_size, MAX_RANDOM_VOCABULARY)
    for n, key in enumerate(key for key in MEDIA_IDS if getattr(config, key, 0) >= inner["vocab_size"]):
        fields[config.attribute_map.get(key, key)] = inner["vocab_size"] - 1 - n
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(inner.get(key), int) and inner[key] >= inner["vocab_size"]:
            inner[key] = None
    return total, type(config).from_dict(fields)


@torch.no_grad()
def write_random_model(config: Any, folder: Path, seed: int = 0) -> None:
    """Write a folder in fp32. Transformers' own initial values hide faults: biases are 0, scales are 1, and weights are
    so small that layers hardly matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for the initial values of parameters such as decays, to which noise is added
        lm = unfilled(config, "eager")
    draw = torch.Generator().manual_seed(seed)
    for p in lm.parameters():
        if p.ndim > 1:
            p.normal_(0, p.shape[-1] ** -0.5, generator=draw)
        else:
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    for buffer in persistent_buffers(lm).values():
        if buffer.is_floating_point() and buffer.ndim == 1:  # a router's correction; others are tables, such as decays
            buffer.uniform_(0.5, 0.8, generator=draw)
    lm.save_pretrained(folder)
