"""Reads back weights that are packed for a CPU kernel, by running the kernel.

On a CPU vLLM packs the weight of a linear layer for its kernel and drops the plain one, so no tensor is left to
compare. But a unit vector times the layer gives a column of its weight, exact to the bit, because all other products
are 0. A few columns of each layer, others at each sync, reveal every stale copy, because a copy is always packed
completely.

The fused weights of experts are packed in place, into another order of their elements. vLLM 0.32 does so when it loads
a folder, but not when it reloads, so its kernel would then read elements from the wrong positions. The order is
determined by packing a sequence of numbers, and reverted to read the weights back.

Runs in vLLM's worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from meshrl.core.errors import SyncError
from meshrl.rollout.server.name_map import Patch

NUM_COLUMNS = 16  # columns compared in each layer at each sync


class PackedLayers:
    """The layers of a model with packed weights, and the expected values of their columns."""

    def __init__(self, model: Any, version: int):
        """version: version of the sync, which determines the columns."""
        self._version = version
        self._layers: dict[str, list[tuple[str, Any]]] = {}  # first name of a parameter -> modules that pack it
        first: dict[int, str] = {}
        for prefix, module in model.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                name = first.setdefault(id(weight), f"{prefix}.weight")
                if hasattr(module, "cpu_linear"):
                    self._layers.setdefault(name, []).append((prefix, module))
        self._wanted: dict[str, list[tuple[Patch, torch.Tensor]]] = {}

    def __contains__(self, param: object) -> bool:
        return param in self._layers

    def has_bias(self, param: str) -> bool:
        """Whether this is the bias of such a layer: vLLM's AMX kernel stores it in fp32, with the same values."""
        prefix, _, kind = param.rpartition(".")
        return kind == "bias" and f"{prefix}.weight" in self._layers

    def note(self, patch: Patch, wire: torch.Tensor) -> None:
        """Record the compared columns of a received tensor."""
        width = patch.strides[0]  # width of the layer's weight; the patch may be a part of it
        columns, first = self._columns(width), patch.at % width
        inside = columns[(columns >= first) & (columns < first + patch.shape[1])]
        self._wanted.setdefault(patch.param, []).append((patch, patch.of_wire(wire)[:, inside - first].clone()))

    def pack_shared(self) -> None:
        """Pack the weights of modules that share them with an earlier module. vLLM's reload packs only the first one,
        so a tied head would silently continue with its old copy."""
        for modules in self._layers.values():
            for _, module in modules[1:]:
                module.quant_method.process_weights_after_loading(module)

    def differing(self) -> list[str]:
        """An error text for each wire tensor and layer with other values."""
        faults = []
        for param, wanted in self._wanted.items():
            for prefix, module in self._layers[param]:
                stale = self._stale(module, wanted)
                faults += [f"{patch.name} differs from the packed weight of {prefix}" for patch in stale]
        return faults

    def _stale(self, module: Any, wanted: list[tuple[Patch, torch.Tensor]]) -> list[Patch]:
        width = wanted[0][0].strides[0]
        columns = self._columns(width)
        units = torch.zeros(len(columns), width, dtype=wanted[0][1].dtype)
        units[torch.arange(len(columns)), columns] = 1
        unpacked = module.cpu_linear(units, module.weight, None).T  # [rows, columns]
        stale = []
        for patch, values in wanted:
            row, first = divmod(patch.at, width)
            inside = (columns >= first) & (columns < first + patch.shape[1])
            if not torch.equal(unpacked[row : row + patch.shape[0], inside].to(values.dtype), values):
                stale.append(patch)
        return stale

    def _columns(self, width: int) -> torch.Tensor:
        """The columns of a weight that are compared: evenly spread, shifted by one with each version."""
        step = max(1, width // NUM_COLUMNS)
        return (torch.arange(min(width, NUM_COLUMNS)) * step + self._version % step).sort().values


class PackedExperts:
    """The layers of experts with fused weights that the CPU kernel reads in its own order of elements."""

    def __init__(self, model: Any):
        self._layers: dict[str, tuple[Any, str]] = {}  # prefix -> (layer, instruction set of the kernel)
        for prefix, module in model.named_modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            experts = getattr(kernel, "fused_experts", None)
            isa = getattr(experts, "isa", None)
            if isa is not None and not getattr(experts, "_use_zentorch", False):
                self._layers[prefix] = module, isa

    def pack(self) -> None:
        """Pack the weights after a reload, which leaves them in the order in which they were sent."""
        for _, weight, isa in self._weights():
            weight.copy_(_pack(weight, isa))

    def unpacked(self) -> dict[str, torch.Tensor]:
        """Copies in the order in which the weights were sent, by the engine's names."""
        copies = {}
        for name, weight, isa in self._weights():
            plain = torch.empty_like(weight)
            plain.flatten(1)[:, _order(tuple(weight.shape[1:]), weight.dtype, isa)] = weight.flatten(1)
            copies[name] = plain
        return copies

    def _weights(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        for prefix, (layer, isa) in self._layers.items():
            for name in ("w13_weight", "w2_weight"):
                yield f"{prefix}.{name}", getattr(layer, name).data, isa


def _pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    packed: torch.Tensor = cpu_prepack_moe_weight(weight, isa)
    return packed


@lru_cache(maxsize=8)
def _order(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """For each element of one expert's packed weight, its index in the plain one."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    numbers = torch.arange(shape[0] * shape[1])
    order = torch.zeros_like(numbers)
    for shift in range(0, 32, 8 * dtype.itemsize):
        digits = (numbers >> shift).to(bits).view(dtype).view(1, *shape)
        order += (_pack(digits, isa).view(bits).flatten().long() % (1 << 8 * dtype.itemsize)) << shift
    if not torch.equal(order.sort().values, numbers):
        raise SyncError(
            f"vLLM's kernel for experts ({isa}) changes weights of shape {shape} when it packs them, so they can't be "
            "read back; use another vLLM release for this model"
        )
    return order
