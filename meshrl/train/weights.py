"""What one train rank holds of the tensors that samplers need: boxes, by hub name."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.lora import RoundedChange, adapters_of, is_adapter, named_weights
from meshrl.model.lora import merged as merged_with
from meshrl.parallel.boxes import boxes
from meshrl.sync.layout import Box
from meshrl.sync.sender import Elements, SourceBox


@dataclass(kw_only=True, slots=True)
class RankWeights:
    """tensors: {name: (shape of the full tensor, dtype on the wire)}. sources: this rank's boxes of each. tied: alias
    -> the name that is sent for it. rounded: measures the merged weights that were read."""

    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    sources: dict[str, list[SourceBox]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    rounded: RoundedChange

    def boxes(self) -> list[Box]:
        """The boxes without their elements."""
        return [Box(name, box.offsets, box.shape) for name, own in self.sources.items() for box in own]


@torch.no_grad()
def rank_weights(lm: torch.nn.Module, names: HubNames, dtype: torch.dtype, merged: bool = False) -> RankWeights:
    """This rank's boxes of each parameter, as views in the master dtype, to be sent in `dtype`; and of the buffers that
    belong to the model's files, in their own dtype.

    merged (a collective): LoRA adapters are merged when the elements are read, for a sampler without adapters.
    """
    weights = RankWeights(tied=dict(names.tied), rounded=RoundedChange(dtype))
    adapters = adapters_of(lm) if merged else {}
    parameters = {name: p for name, p in named_weights(lm) if not (merged and is_adapter(name))}
    buffers = persistent_buffers(lm)
    for name, full in [*parameters.items(), *buffers.items()]:
        sent = full.dtype if name in buffers else dtype
        for hub_name in names.of(name):
            weights.tensors[hub_name] = names.tensors[hub_name], str(sent).removeprefix("torch.")
            weights.sources[hub_name] = []
        rows_of = merged_with(adapters[name], weights.rounded) if name in adapters else None
        for offsets, local in boxes(full):
            for hub_name, start, view in names.split(name, offsets, local):
                rows = None if rows_of is None else rows_of(view, *names.in_module(hub_name, start, tuple(view.shape)))
                weights.sources[hub_name].append(SourceBox(start, tuple(view.shape), Elements(view, rows)))
    return weights
