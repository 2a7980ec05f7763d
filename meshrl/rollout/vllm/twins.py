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
    """The model with a twin without data in the place of each parameter and persistent buffer, in the shape that
    checkpoints are loaded into: {name: twin}. One that stands in two modules has one twin, under its first name."""
    held = [
        (f"{prefix}.{name}" if prefix else name, layer, kind, name, tensor)
        for prefix, layer in model.named_modules()
        for kind, table in enumerate((layer._parameters, layer._buffers))  # in the order of vLLM's own record
        for name, tensor in table.items()
        if tensor is not None and name not in layer._non_persistent_buffers_set
    ]
    twins: dict[int, torch.Tensor] = {}
    names: dict[str, torch.Tensor] = {}
    try:
        for path, layer, kind, name, tensor in held:
            if id(tensor) not in twins:
                recorded = get_layerwise_info(layer).restore_metadata[kind].get(name)
                twin = restore_layer_refs(to_meta_tensor(tensor if recorded is None else recorded), layer)
                if hasattr(twin, "weight_loader"):
                    twin.weight_loader = _unwrapped(twin.weight_loader)
                names[path] = twins[id(tensor)] = twin
            (layer._parameters, layer._buffers)[kind][name] = twins[id(tensor)]
        yield names
    finally:
        for _, layer, kind, name, tensor in held:
            (layer._parameters, layer._buffers)[kind][name] = tensor


def _unwrapped(loader: Any) -> Any:
    """A loader as it was before a reload wrapped it into one that waits for the whole layer: vLLM's record of the
    parameter keeps the wrapping."""
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__
    return loader
