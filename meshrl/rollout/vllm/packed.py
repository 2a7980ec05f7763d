"""Weights that a CPU kernel has packed, read back through the kernel itself.

On the CPU vLLM packs the weight of a linear layer for its kernel and drops the plain one, so no tensor is left that
could be compared. But a unit vector times the layer is a column of what the layer computes with, exact to the bit: all
other products are 0. A few columns of each layer, other ones at each sync, show every copy that was left behind: a
copy is packed whole or not at all.

Runs in vLLM's worker.
"""

from __future__ import annotations

from typing import Any

import torch

from meshrl.rollout.foreign.name_map import Patch

NUM_COLUMNS = 16  # of each layer at each sync


class PackedLayers:
    """The layers of a model whose weight is a packed copy, and what each should compute with."""

    def __init__(self, model: Any, version: int):
        """version: of the sync; it chooses the columns."""
        self._version = version
        self._layers: dict[str, list[tuple[str, Any]]] = {}  # parameter, as it was named first -> modules that pack it
        first: dict[int, str] = {}
        for prefix, module in model.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                name = first.setdefault(id(weight), f"{prefix}.weight")
                if hasattr(module, "cpu_linear"):
                    self._layers.setdefault(name, []).append((prefix, module))
        self._wanted: dict[str, list[tuple[Patch, torch.Tensor]]] = {}

    def __contains__(self, param: str) -> bool:
        return param in self._layers

    def has_bias(self, param: str) -> bool:
        """Whether this is the bias of such a layer: vLLM's kernel for AMX holds it in fp32, with the same values."""
        prefix, _, kind = param.rpartition(".")
        return kind == "bias" and f"{prefix}.weight" in self._layers

    def note(self, patch: Patch, wire: torch.Tensor) -> None:
        """Keep the probed columns of what arrived for a layer."""
        width = patch.strides[0]  # of the layer's own weight, of which the patch may be a part
        columns, first = self._columns(width), patch.at % width
        inside = columns[(columns >= first) & (columns < first + patch.shape[1])]
        self._wanted.setdefault(patch.param, []).append((patch, patch.of(wire)[:, inside - first].clone()))

    def pack_shared(self) -> None:
        """Pack again what shares its weight with a module loaded before: vLLM packs anew only what is loaded itself, so
        a tied head would go on computing with its old copy, without a word."""
        for modules in self._layers.values():
            for _, module in modules[1:]:
                module.quant_method.process_weights_after_loading(module)

    def differing(self) -> list[str]:
        """Wire names whose values some layer does not compute with, and which layer."""
        faults = []
        for param, wanted in self._wanted.items():
            for prefix, module in self._layers[param]:
                faults += [f"{patch.name} is not what {prefix} computes with" for patch in self._stale(module, wanted)]
        return faults

    def _stale(self, module: Any, wanted: list[tuple[Patch, torch.Tensor]]) -> list[Patch]:
        width = wanted[0][0].strides[0]
        columns = self._columns(width)
        units = torch.zeros(len(columns), width, dtype=wanted[0][1].dtype)
        units[torch.arange(len(columns)), columns] = 1
        held = module.cpu_linear(units, module.weight, None).T  # [rows, columns]
        stale = []
        for patch, values in wanted:
            row, first = divmod(patch.at, width)
            inside = (columns >= first) & (columns < first + patch.shape[1])
            if not torch.equal(held[row : row + patch.shape[0], inside].to(values.dtype), values):
                stale.append(patch)
        return stale

    def _columns(self, width: int) -> torch.Tensor:
        """Which columns of a weight are probed: evenly spread, moved on by one with each version."""
        step = max(1, width // NUM_COLUMNS)
        return (torch.arange(min(width, NUM_COLUMNS)) * step + self._version % step).sort().values
