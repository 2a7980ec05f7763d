"""Weights that a CPU kernel has packed, read back through the kernel itself.

On the CPU vLLM packs the weight of a linear layer for its kernel and drops the plain one, so no tensor is left that
could be compared. But a unit vector times the layer is a column of what the layer computes with, exact to the bit: all
other products are 0. A few columns of each layer, other ones at each sync, show every copy that was left behind: a
copy is packed whole or not at all.

The joint weights of experts are packed in place, into another order of their elements. vLLM 0.32 does so when it loads
a folder and not when it reloads, so that its kernel would then compute with elements in the wrong places. The order is
learned by packing numbers, and reverted to read the weights back.

Runs in vLLM's worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from meshrl.core.errors import SyncError
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


class PackedExperts:
    """The layers of experts whose joint weights the CPU's kernel reads in an order of its own."""

    def __init__(self, model: Any):
        self._layers: dict[str, tuple[Any, str]] = {}  # prefix -> (layer, instruction set of the kernel)
        for prefix, module in model.named_modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            experts = getattr(kernel, "fused_experts", None)
            if hasattr(experts, "isa") and not getattr(experts, "_use_zentorch", False):
                self._layers[prefix] = module, experts.isa

    def pack(self) -> None:
        """After a reload, which leaves the weights in the order in which they were sent."""
        for _, weight, isa in self._weights():
            weight.copy_(_pack(weight, isa))

    def unpacked(self) -> dict[str, torch.Tensor]:
        """Copies in the order in which they were sent, by the engine's names."""
        found = {}
        for name, weight, isa in self._weights():
            plain = torch.empty_like(weight)
            plain.flatten(1)[:, _order(tuple(weight.shape[1:]), weight.dtype, isa)] = weight.flatten(1)
            found[name] = plain
        return found

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
    """For each element of one expert's packed weight, its place in the plain one. Raises: SyncError when packing does
    more than to reorder."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    numbers = torch.arange(shape[0] * shape[1])
    order = torch.zeros_like(numbers)
    for shift in range(0, 32, 8 * dtype.itemsize):
        digits = (numbers >> shift).to(bits).view(dtype).view(1, *shape)
        order += (_pack(digits, isa).view(bits).flatten().long() % (1 << 8 * dtype.itemsize)) << shift
    if not torch.equal(order.sort().values, numbers):
        raise SyncError(f"vLLM's kernel for experts ({isa}) changes weights of shape {shape} where it packs them")
    return order
