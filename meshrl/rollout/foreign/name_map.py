"""Where the elements of the trainer's tensors lie in another engine's parameters, learned by watching its own loader.

vLLM and SGLang fuse projections, pad vocabularies, and give each tensor-parallel rank its slices; how, is known to each
model class's `load_weights` alone. So `learn` hands it every name of the layout as a tensor without data, over
parameters without data, and writes down each copy that it makes. What it refuses, or drops, is found before anything is
sent.

Runs in the engine's worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.sync.layout import Layout, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """Elements [offsets, offsets + extent) of a wire tensor, and the view of a parameter that they fill.

    Example: rows 0..63 of a fused projection, Patch(name="model.layers.0.self_attn.q_proj.weight", offsets=(0, 0),
    extent=(64, 64), param="model.layers.0.self_attn.qkv_proj.weight", shape=(64, 64), at=0, strides=(64, 1))
    """

    name: str
    offsets: tuple[int, ...]
    extent: tuple[int, ...]
    shape: tuple[int, ...]  # extent without the dims that the loader indexed away
    param: str
    at: int
    strides: tuple[int, ...]

    def inside(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of the parameter, in the wire tensor's dims."""
        data = parameter.detach()
        view = data.as_strided(self.shape, self.strides, data.storage_offset() + self.at)
        return view.view(self.extent)

    def of(self, wire: torch.Tensor) -> torch.Tensor:
        """The same elements of the wire tensor."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.extent, strict=True)):
            wire = wire.narrow(dim, start, size)
        return wire


@dataclass(kw_only=True, slots=True)
class NameMap:
    """What one worker's loader does with the layout's names.

    refused: name -> why. dropped: loaded into nothing. hidden: loaded, but through arithmetic that can't be followed,
    so not readable back. unfilled: parameter -> (shape, dtype) that no name fills; a buffer may be the engine's own,
    such as a scale of its cache. dtypes: of the parameters that a name fills, and of what is sent for a buffer: an
    engine may keep that in another dtype, if it holds the very same values, which the read-back proves.
    """

    patches: dict[str, list[Patch]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    unfilled: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)


WithoutData = Callable[[Any], AbstractContextManager[dict[str, torch.Tensor]]]
"""Puts a twin without data in the place of each parameter and persistent buffer of a model, while it is entered:
{name: twin}."""


class _Watch(TorchDispatchMode):
    """Notes every copy and fill, and lets it happen."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.fills: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default):
            self.fills.append(args[0])
        return func(*args, **(kwargs or {}))


def learn(model: Any, layout: Layout, without_data: WithoutData) -> NameMap:
    """Watch `model.load_weights` take each name of the layout, and each of its aliases. The model is left as it was."""
    entries = layout.by_name
    found = NameMap()
    with without_data(model) as twins, torch.no_grad():
        by_storage = {_storage(twin): (name, twin) for name, twin in twins.items()}
        parameters = {name: twin for name, twin in twins.items() if isinstance(twin, torch.nn.Parameter)}
        filled = dict.fromkeys(twins, 0)
        for name, entry in (entries | {alias: entries[source] for alias, source in layout.tied.items()}).items():
            wire = torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta")
            watch = _Watch()
            try:
                with watch:
                    loaded = model.load_weights([(name, wire)])
            except Exception as error:  # loaders refuse by assert, KeyError, ValueError, RuntimeError
                if name in entries:
                    found.refused[name] = f"{type(error).__name__}: {error}".strip()
                continue
            patches = []
            for target, source in watch.copies:
                param, twin = by_storage.get(_storage(target), (None, None))
                if param is None or twin is None or _storage(source) != _storage(wire):
                    continue
                patch = _patch(name, entry, source, param, target)
                if patch is not None:
                    patches.append(patch)
                    own = str(twin.dtype).removeprefix("torch.")
                    found.dtypes[name] = own if param in parameters else entry.dtype
                filled[param] += target.numel()
            for target in watch.fills:
                if _storage(target) in by_storage:
                    filled[by_storage[_storage(target)][0]] += target.numel()
            if patches:
                found.patches[name] = patches
            elif name in entries:
                (found.hidden if loaded else found.dropped).append(name)
        for name, twin in parameters.items():
            if filled[name] < getattr(twin, "weight_loader_numel", twin.numel()):
                found.unfilled[name] = (list(twin.shape), str(twin.dtype).removeprefix("torch."))
    return found


def _patch(name: str, entry: TensorSpec, source: torch.Tensor, param: str, target: torch.Tensor) -> Patch | None:
    """None when the source is no block of the wire tensor in its own order of dims (transposed, flattened, ...)."""
    strides = torch.empty(entry.shape, device="meta").stride()
    extent = _taken(source, entry.shape, strides)
    offsets, rest = [], source.storage_offset()
    for stride in strides:
        offsets.append(rest // stride)
        rest -= offsets[-1] * stride
    if extent is None or rest or source.shape != target.shape:
        return None
    return Patch(
        name=name,
        offsets=tuple(offsets),
        extent=extent,
        shape=tuple(source.shape),
        param=param,
        at=target.storage_offset(),
        strides=tuple(target.stride()),
    )


def _taken(source: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Elements that a view takes along each dim of the tensor that it is of, 1 along a dim that it has no more."""
    left = [(size, stride) for size, stride in zip(source.shape, source.stride(), strict=True)]
    taken = []
    for size, stride in zip(shape, strides, strict=True):
        if left and left[0][1] == stride and left[0][0] <= size:
            taken.append(left.pop(0)[0])
        else:
            taken.append(1)
    return None if left else tuple(taken)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
