"""Where the elements of the trainer's tensors are in another engine's parameters, found by tracing its own loader.

vLLM and SGLang fuse projections, pad vocabularies, and give each tensor-parallel rank its slices. Only `load_weights`
of each model class knows how. So `trace_loader` replaces the parameters by placeholders without data, calls
`load_weights` with a tensor without data for each name of the layout, and records each copy. Names that the loader
refuses or ignores are found before anything is sent.

Runs in the engine's worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.parallel.boxes import index_of
from meshrl.sync.layout import Layout, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A block of elements: [offsets, offsets + extent) of a wire tensor, and the view of a parameter that they fill.

    Example: rows 0..63 of a fused projection, Patch(name="model.layers.0.self_attn.q_proj.weight", offsets=(0, 0),
    extent=(64, 64), param="model.layers.0.self_attn.qkv_proj.weight", shape=(64, 64), at=0, strides=(64, 1))
    """

    name: str
    offsets: tuple[int, ...]
    extent: tuple[int, ...]
    shape: tuple[int, ...]  # extent without the dims that the loader has removed by indexing
    param: str
    at: int
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{a}:{a + n}' for a, n in zip(self.offsets, self.extent, strict=True))}]"

    def of_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """The block as a view of the parameter, in the wire tensor's dims."""
        data = parameter.detach()
        view = data.as_strided(self.shape, self.strides, data.storage_offset() + self.at)
        return view.view(self.extent)

    def of_wire(self, wire: torch.Tensor) -> torch.Tensor:
        """The block as a view of the wire tensor."""
        return wire[index_of((self.offsets, self.extent))]


@dataclass(kw_only=True, slots=True)
class NameMap:
    """What one worker's loader does with the layout's names.

    refused: name -> reason. hidden: names that are loaded through arithmetic that can't be traced, and so can't be read
    back. unfilled: parameter -> (shape, dtype) that no name fills; buffers are not listed, because they may be internal
    to the engine, like a scale of its cache. dtypes: name -> dtype of the parameter that it fills; for a buffer the
    dtype that is sent: an engine may store it in another dtype, if the values are exactly equal, which the read-back
    proves. A name that the loader ignores is in no field.
    """

    patches: dict[str, list[Patch]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    unfilled: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)


MakePlaceholder = Callable[[Any, str, torch.Tensor], torch.Tensor]
"""`make(layer, name, tensor)`: a tensor without data, in the shape that checkpoints are loaded into, with everything
that the server's loader needs of a layer's tensor."""


class _CopyRecorder(TorchDispatchMode):
    """Records every copy and fill, and executes it."""

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


def trace_loader(model: Any, layout: Layout, make_placeholder: MakePlaceholder) -> NameMap:
    """Record how `model.load_weights` loads each name of the layout, and each alias. The model stays unchanged."""
    entries = layout.by_name
    name_map = NameMap()
    with _without_data(model, make_placeholder) as placeholders, torch.no_grad():
        by_storage = {_storage(placeholder): (name, placeholder) for name, placeholder in placeholders.items()}
        parameters = {
            name: placeholder
            for name, placeholder in placeholders.items()
            if isinstance(placeholder, torch.nn.Parameter)
        }
        filled = dict.fromkeys(placeholders, 0)
        for name, entry in (entries | {alias: entries[source] for alias, source in layout.tied.items()}).items():
            wire = torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta")
            recorder = _CopyRecorder()
            try:
                with recorder:
                    loaded = model.load_weights([(name, wire)])
            except Exception as error:  # loaders refuse with AssertionError, KeyError, ValueError, RuntimeError
                if name in entries:
                    name_map.refused[name] = f"{type(error).__name__}: {error}".strip()
                continue
            patches = []
            for target, source in recorder.copies:
                param, placeholder = by_storage.get(_storage(target), (None, None))
                if param is None or placeholder is None or _storage(source) != _storage(wire):
                    continue
                patch = _patch(name, entry, source, param, target)
                if patch is not None:
                    patches.append(patch)
                    dtype = str(placeholder.dtype).removeprefix("torch.")
                    name_map.dtypes[name] = dtype if param in parameters else entry.dtype
                filled[param] += target.numel()
            for target in recorder.fills:
                if _storage(target) in by_storage:
                    filled[by_storage[_storage(target)][0]] += target.numel()
            if patches:
                name_map.patches[name] = patches
            elif name in entries and loaded:
                name_map.hidden.append(name)
        for name, placeholder in parameters.items():
            if filled[name] < getattr(placeholder, "weight_loader_numel", placeholder.numel()):
                name_map.unfilled[name] = (list(placeholder.shape), str(placeholder.dtype).removeprefix("torch."))
    return name_map


@contextmanager
def _without_data(model: Any, make_placeholder: MakePlaceholder) -> Iterator[dict[str, torch.Tensor]]:
    """Replace each parameter and persistent buffer by a placeholder; yields {name: placeholder}. A tensor in two
    modules has one placeholder, under its first name."""
    tensors = [
        (f"{prefix}.{name}" if prefix else name, layer, table, name, tensor)
        for prefix, layer in model.named_modules()
        for table in (layer._parameters, layer._buffers)
        for name, tensor in table.items()
        if tensor is not None and name not in layer._non_persistent_buffers_set
    ]
    made: dict[int, torch.Tensor] = {}
    placeholders: dict[str, torch.Tensor] = {}
    try:
        for path, layer, table, name, tensor in tensors:
            if id(tensor) not in made:
                placeholders[path] = made[id(tensor)] = make_placeholder(layer, name, tensor)
            table[name] = made[id(tensor)]
        yield placeholders
    finally:
        for _, _, table, name, tensor in tensors:
            table[name] = tensor


def _patch(name: str, entry: TensorSpec, source: torch.Tensor, param: str, target: torch.Tensor) -> Patch | None:
    """None when the source is not a block of the wire tensor with the same order of dims (transposed, flattened)."""
    strides = torch.empty(entry.shape, device="meta").stride()
    extent = _extent(source, entry.shape, strides)
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
        at=int(target.storage_offset()),
        strides=tuple(target.stride()),
    )


def _extent(source: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The size of a view along each dim of its base tensor, 1 along a dim that was removed; None if it is no block."""
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
