"""Placeholders without data for the parameters of a vLLM model, for `name_map.trace_loader`. Runs in vLLM's worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs


@contextmanager
def without_data(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Replace each parameter and persistent buffer by a placeholder without data, in the shape that checkpoints are
    loaded into; yields {name: placeholder}. A tensor in two modules has one placeholder, under its first name."""
    held = [
        (f"{prefix}.{name}" if prefix else name, layer, kind, name, tensor)
        for prefix, layer in model.named_modules()
        for kind, table in enumerate((layer._parameters, layer._buffers))  # in the order of vLLM's restore_metadata
        for name, tensor in table.items()
        if tensor is not None and name not in layer._non_persistent_buffers_set
    ]
    placeholders: dict[int, torch.Tensor] = {}
    names: dict[str, torch.Tensor] = {}
    try:
        for path, layer, kind, name, tensor in held:
            if id(tensor) not in placeholders:
                recorded = get_layerwise_info(layer).restore_metadata[kind].get(name)
                placeholder = restore_layer_refs(to_meta_tensor(tensor if recorded is None else recorded), layer)
                if hasattr(placeholder, "weight_loader"):
                    placeholder.weight_loader = _unwrapped(placeholder.weight_loader)
                names[path] = placeholders[id(tensor)] = placeholder
            (layer._parameters, layer._buffers)[kind][name] = placeholders[id(tensor)]
        yield names
    finally:
        for _, layer, kind, name, tensor in held:
            (layer._parameters, layer._buffers)[kind][name] = tensor


def _unwrapped(loader: Any) -> Any:
    """The original loader. vLLM's reload wraps it into one that waits for the complete layer, and its restore_metadata
    retains the wrapper."""
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__
    return loader
