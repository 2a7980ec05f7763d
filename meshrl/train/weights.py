"""What one train rank holds of each tensor, for samplers: boxes under the names of the model's files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from meshrl.model.hub_names import HubNames, persistent_buffers, tied_names
from meshrl.model.lora import MergedElements, adapters_of, is_adapter, named_weights, wire_name
from meshrl.parallel.boxes import boxes
from meshrl.parallel.fsdp import whole
from meshrl.sync.layout import Box
from meshrl.sync.sender import BlockElements, Elements, Held


@dataclass(kw_only=True, slots=True)
class HeldWeights:
    """tensors: {name: (shape of the full tensor, dtype as sent)}. held: this rank's boxes of each. tied: alias -> the
    name that is sent for it."""

    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    held: dict[str, list[Held]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    def boxes(self) -> list[Box]:
        """Without their elements."""
        return [Box(name, box.offsets, box.shape) for name, own in self.held.items() for box in own]


@torch.no_grad()
def held_weights(lm: torch.nn.Module, names: HubNames, dtype: torch.dtype, merged: bool = False) -> HeldWeights:
    """This rank's boxes of each parameter, as the optimizer left them, in the masters' dtype, to be sent in `dtype`;
    and of the buffers that belong to the model's files, in their own dtype. They are views.

    merged (a collective): LoRA adapters are added to their weights where these are read, for a sampler without them.
    """
    found = HeldWeights()
    adapters = adapters_of(lm) if merged else {}
    parameters = {name: p for name, p in named_weights(lm) if not (merged and is_adapter(name))}
    buffers = persistent_buffers(lm)
    for name, full in [*parameters.items(), *buffers.items()]:
        sent = full.dtype if name in buffers else dtype
        for hub_name in names.of(name):
            found.tensors[hub_name] = names.tensors[hub_name], str(sent).removeprefix("torch.")
            found.held[hub_name] = []
        for offsets, local in boxes(full.detach()):
            for hub_name, start, view in names.split(name, offsets, local):
                found.held[hub_name].append(Held(start, tuple(view.shape), BlockElements(view)))
        if name in adapters:
            (hub_name,) = names.of(name)
            a, b = whole(adapters[name].a.detach()), whole(adapters[name].b.detach())
            scale = adapters[name].scale
            found.held[hub_name] = [_merged(box, a, b, scale) for box in found.held[hub_name]]
    for alias, source in tied_names(lm).items():
        found.tied.update(zip(_hub(names, [wire_name(alias)]), _hub(names, [wire_name(source)]), strict=True))
    return found


def _hub(names: HubNames, own: Iterable[str]) -> list[str]:
    return [hub_name for name in own for hub_name in names.of(name)]


def _merged(box: Held, a: torch.Tensor, b: torch.Tensor, scale: float) -> Held:
    """The same box with its part of scale * B A added."""
    rows, columns = (slice(at, at + size) for at, size in zip(box.offsets, box.shape, strict=True))
    assert isinstance(box.elements, BlockElements)
    elements: Elements = MergedElements(box.elements.block, a[:, columns], b[rows], scale)
    return box._replace(elements=elements)
