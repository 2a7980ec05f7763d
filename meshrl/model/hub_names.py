"""Hub names: a model's tensors as its family's safetensors files name them, as views of the module's tensors.

Transformers joins tensors of the files: the experts of a layer become `experts.gate_up_proj` [E, 2I, H]. This file
reverts its rules once, on tensors without data, and records for each resulting view which box of the module's tensor it
is. A tensor that is joined in another way (interleaved, permuted) has no views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from meshrl.model.lora import is_adapter, named_weights, weight_name, wire_name
from meshrl.parallel.boxes import Box, overlap


class _View(NamedTuple):
    """A hub tensor as a box of a module's tensor. dims: the dim of the module's tensor for each dim of the hub tensor;
    None for a dim of size 1 that the module's tensor does not have."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    extent: tuple[int, ...]
    dims: tuple[int | None, ...]


class _Block(NamedTuple):
    """The part of a hub tensor in one box of a module's tensor. offsets: its position in the hub tensor. first: the
    index of its first element in the box's memory."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int


class HubNames:
    """tensors: hub name -> full shape, for each parameter (a tied one under its first name), each persistent buffer
    and each LoRA adapter, in the module's order. computed: module name -> why there are no views of this tensor; it
    keeps its module name. module_names: hub name -> wire name of the module's tensor. tied: hub name of an alias -> hub
    name of the tensor that it shares.

    lm may be on the meta device, sharded, or have adapters.
    """

    def __init__(self, lm: torch.nn.Module):
        self.computed: dict[str, str] = {}
        self._blocks: dict[tuple[Any, ...], list[_Block]] = {}  # the same in every sync
        aliases = {wire_name(alias): wire_name(name) for alias, name in tied_names(lm).items()}
        shapes = {name: tuple(p.shape) for name, p in named_weights(lm)}
        shapes |= {wire_name(name): tuple(b.shape) for name, b in persistent_buffers(lm).items()}
        of_files = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
        self._views = self._reverted(lm, of_files | {alias: shapes[name] for alias, name in aliases.items()})
        for name in filter(is_adapter, shapes):
            self._views[name] = [_same(self._adapter(name), shapes[name])]
        self._view_of = {view.name: view for name in shapes for view in self._views[name]}
        self.tensors = {name: view.shape for name, view in self._view_of.items()}
        self.module_names = {view.name: name for name in shapes for view in self._views[name]}
        self.tied = {
            alias: first for module in aliases for alias, first in zip(self.of(module), self.of(aliases[module]))
        }

    def of(self, name: str) -> tuple[str, ...]:
        """The hub names of the module's tensor with this wire name. A tied alias has hub names of its own."""
        return tuple(view.name for view in self._views[name])

    def split(
        self, name: str, offsets: tuple[int, ...], local: torch.Tensor
    ) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Cut a box of the module's tensor into boxes of hub tensors: (hub name, offsets there, view of local)."""
        views = self._views[name]
        if len(views) == 1 and views[0].dims == tuple(range(local.dim())):  # the hub tensor is the module's tensor
            yield views[0].name, offsets, local
            return
        key = name, offsets, local.shape, local.stride()
        if key not in self._blocks:
            self._blocks[key] = list(_blocks(views, offsets, tuple(local.shape), local.stride()))
        for block in self._blocks[key]:
            first = local.storage_offset() + block.first
            yield block.name, block.offsets, local.as_strided(block.shape, block.strides, first)

    def in_module(
        self, hub_name: str, offsets: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[Box, tuple[int | None, ...]]:
        """The box of the module's tensor that a box of a hub tensor is, and the dim of it for each dim of the box."""
        view = self._view_of[hub_name]
        starts, sizes = list(view.offsets), [1] * len(view.offsets)
        for dim, at, size in zip(view.dims, offsets, shape, strict=True):
            if dim is not None:
                starts[dim], sizes[dim] = starts[dim] + at, size
        return (tuple(starts), tuple(sizes)), view.dims

    def _reverted(self, lm: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, list[_View]]:
        """The views that Transformers' reverted rules make of each tensor; fills `computed`."""
        from transformers.core_model_loading import revert_weight_conversion

        sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        by_storage = {_storage(tensor): name for name, tensor in sources.items()}
        views: dict[str, list[_View]] = {name: [] for name in shapes}
        with _KeepViews(), torch.no_grad():
            results = revert_weight_conversion(lm, sources)
        for hub_name, tensor in results.items():
            source = by_storage.get(_storage(tensor))
            view = None if source is None else _view(hub_name, tensor, shapes[source])
            if source is not None and view is not None:
                views[source].append(view)
        for name, shape in shapes.items():
            if sum(prod(view.extent) for view in views[name]) != prod(shape):
                self.computed[name] = f"Transformers' rules for {type(lm).__name__} leave no views of {name}"
                views[name] = [_same(name, shape)]
        return views

    def _adapter(self, name: str) -> str:
        """The name of lora_A or lora_B after the hub name of its layer's weight, if that weight is one hub tensor."""
        weight = weight_name(name)
        views = self._views.get(weight, ())  # none for the adapter of experts, which no sampler gets
        if len(views) == 1 and views[0].name.endswith(".weight"):
            return views[0].name.removesuffix(".weight") + name.removeprefix(weight.removesuffix(".weight"))
        return name


def _blocks(
    views: Sequence[_View], offsets: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> Iterator[_Block]:
    """The parts of hub tensors in a box with these offsets, shape and strides."""
    for view in views:
        shared = overlap((offsets, shape), (view.offsets, view.extent))
        if shared is None:
            continue
        starts, sizes = shared
        yield _Block(
            view.name,
            tuple(0 if dim is None else starts[dim] - view.offsets[dim] for dim in view.dims),
            tuple(1 if dim is None else sizes[dim] for dim in view.dims),
            tuple(1 if dim is None else strides[dim] for dim in view.dims),
            sum((at - start) * stride for at, start, stride in zip(starts, offsets, strides, strict=True)),
        )


class _KeepViews(TorchFunctionMode):
    """Skips copies that only reorder memory: they would hide which tensor a result is a view of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in _COPIES else func(*args, **(kwargs or {}))


_COPIES = (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone)


def _view(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> _View | None:
    """The box that a strided view takes of a contiguous tensor of this shape; None if the view is not a box."""
    strides = torch.empty(shape, device="meta").stride()
    dim_of = {stride: dim for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1}
    offsets, rest = [0] * len(shape), int(tensor.storage_offset())
    for stride, dim in dim_of.items():
        offsets[dim], rest = divmod(rest, stride)
    extent = [1] * len(shape)
    dims: list[int | None] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        cut = dim_of.get(stride) if size > 1 else None
        if size > 1 and (cut is None or offsets[cut] + size > shape[cut] or extent[cut] > 1):
            return None
        if cut is not None:
            extent[cut] = size
        dims.append(cut)
    return _View(name, tuple(tensor.shape), tuple(offsets), tuple(extent), tuple(dims))


def _same(name: str, shape: tuple[int, ...]) -> _View:
    return _View(name, shape, (0,) * len(shape), shape, tuple(range(len(shape))))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Alias -> the name that holds the tensor, for every parameter that appears under two names."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            tied[name] = first[id(p)]
        else:
            first[id(p)] = name
    return tied


def persistent_buffers(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a model's files, in their own dtype, such as a router's correction bias."""
    found: dict[int, tuple[str, torch.Tensor]] = {}  # by id: a buffer of several modules has its first name
    for prefix, module in lm.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
    return {name: buffer.detach() for name, buffer in found.values()}
