"""A vLLM model without its data, for `name_map.learn`. Runs in vLLM's worker."""

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
    """The model with a twin without data in the place of each parameter, in the shape that checkpoints are loaded into:
    {name: twin}. A parameter that stands in two modules has one twin, under its first name."""
    held = [
        (prefix, layer, name, param)
        for prefix, layer in model.named_modules()
        for name, param in layer._parameters.items()
        if param is not None
    ]
    twins: dict[int, torch.Tensor] = {}
    names: dict[str, torch.Tensor] = {}
    try:
        for prefix, layer, name, param in held:
            if id(param) not in twins:
                recorded = get_layerwise_info(layer).restore_metadata[0].get(name)
                twin = restore_layer_refs(to_meta_tensor(param if recorded is None else recorded), layer)
                if hasattr(twin, "weight_loader"):
                    twin.weight_loader = _unwrapped(twin.weight_loader)
                names[f"{prefix}.{name}" if prefix else name] = twins[id(param)] = twin
            layer._parameters[name] = twins[id(param)]
        yield names
    finally:
        for _, layer, name, param in held:
            layer._parameters[name] = param


def _unwrapped(loader: Any) -> Any:
    """A loader as it was before a reload wrapped it into one that waits for the whole layer: vLLM's record of the
    parameter keeps the wrapping."""
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__
    return loader
