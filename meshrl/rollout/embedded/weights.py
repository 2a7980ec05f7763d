"""The engine's weights: their version, syncs that replace them in place, and releasing their memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from meshrl.core.errors import SyncError
from meshrl.model.fast_decoder import FastDecoder
from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.lora import named_weights
from meshrl.sync.layout import Layout
from meshrl.sync.receiver import Receiver, describe, reconcile


class EngineWeights(Receiver):
    """Names are the names in the model's files (HubNames). A tied weight is stored once and read back under both."""

    def __init__(
        self,
        lm: torch.nn.Module,
        name: str,
        fast: FastDecoder | None = None,
        shared: Collection[torch.nn.Parameter] = (),
    ):
        """fast: replaces the model's own forward. shared: parameters of lm that a trainer computes with, too; its
        frozen ones, or none."""
        self.lm, self._fast, self._shared = lm, fast, {id(p) for p in shared}
        self._names = HubNames(lm)
        super().__init__(self._tensors, name, frozenset(self.shared))

    def reconcile(self, layout: Layout) -> None:
        reconcile(layout, describe(self._tensors()), self._names.tied)
        super().reconcile(layout)

    def release(self) -> int:
        """Free the parameters' memory; returns bytes freed. Buffers stay: a sync does not send most of them. Shared
        parameters stay, and so do the joint tensors that they are views of."""
        self.cancel()
        self.state.end("released")
        freed = 0
        if self._fast is not None and not self._shared:
            self._fast.split()
        for p in self.lm.parameters():
            if id(p) in self._shared:
                continue
            if not p.untyped_storage().resizable():  # it maps the model file, or shares its memory with numpy
                p.data = torch.empty_like(p.data)
            freed += p.untyped_storage().nbytes()
            p.untyped_storage().resize_(0)
        return freed

    def restore(self) -> int:
        """Allocate the memory again; returns bytes. Its content is garbage until the next full sync."""
        before = after = 0
        for p in self.lm.parameters():  # several parameters may be views of one storage
            needed = (int(p.storage_offset()) + p.numel()) * p.element_size()
            storage = p.untyped_storage()
            if storage.nbytes() < needed:
                before, after = before + storage.nbytes(), after + needed
                storage.resize_(needed)
        if self._fast is not None and not self._shared:
            self._fast.fuse()
        return after - before

    @property
    def shared(self) -> dict[str, torch.Tensor]:
        """The shared parameters by their names in the files."""
        return dict(self._views({name: p for name, p in named_weights(self.lm) if id(p) in self._shared}))

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._views(dict(named_weights(self.lm)) | persistent_buffers(self.lm)))

    def _views(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the model's tensors by their names in the files, where fused experts are separate tensors."""
        for name, tensor in tensors.items():
            for hub_name, _, view in self._names.split(name, (0,) * tensor.dim(), tensor.detach()):
                yield hub_name, view

    def read_back(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under each of its names, and every persistent buffer, as the forward uses them."""
        joint = {} if self._fast is None else self._fast.joint()
        read: dict[int, list[torch.Tensor]] = {}  # by id: a tied parameter is one object under several names
        for name, p in named_weights(self.lm, remove_duplicate=False):
            if joint.get(id(p), p).data_ptr() != p.data_ptr():
                raise SyncError(
                    f"{self.state.name}: {name} is not a view of the fused tensor that the forward uses, so one of "
                    "them has old values; this receiver stays unusable: build a new engine"
                )
            if id(p) not in read:
                read[id(p)] = [view for _, view in self._views({name: p})]
            yield from zip(self._names.of(name), read[id(p)], strict=True)
        yield from self._views(persistent_buffers(self.lm))
