"""The engine's weights: which version they are, how a sync replaces them in place, how their memory is lent out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from meshrl.core.errors import StaleWeightsError, SyncError
from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.lean import LeanDecoder
from meshrl.model.lora import named_weights
from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Ack, Layout, SyncHeader
from meshrl.sync.receiver import Receiver
from meshrl.sync.reconcile import describe, reconcile


class EngineWeights:
    """Names are those of the model's files (HubNames); a tied weight is held once and read back under both names."""

    def __init__(self, lm: torch.nn.Module, name: str, lean: LeanDecoder | None = None):
        """lean: the forward that computes in the place of the model's own."""
        self.lm, self.name, self._lean = lm, name, lean
        self._names = HubNames(lm)
        self._receiver: Receiver | None = None
        self._trusted: int | None = None
        self._as_loaded = True  # no sync and no release has touched what the folder held
        self._syncing: int | None = None  # the version that is arriving

    @property
    def version(self) -> int:
        """The version in place; -1 = none: before the first sync, during one, after a cancel or a release."""
        if self._trusted is not None:
            return self._trusted
        return self._receiver.version if self._receiver is not None else -1

    @property
    def expected(self) -> int:
        """The version in place or, during a sync, the one that is arriving."""
        return self.version if self._syncing is None else self._syncing

    def trust(self, version: int) -> None:
        """Call what was loaded from the folder by this version: for evaluation, where no trainer sends weights.

        Raises: StaleWeightsError when a sync or a release has been there since.
        """
        if not self._as_loaded:
            raise StaleWeightsError(
                f"{self.name} no longer holds the weights of its folder: a sync or a release has replaced them; "
                "build a new engine, or sync"
            )
        self._trusted = version

    def reconcile(self, layout: Layout) -> None:
        reconcile(layout, describe(self._held()), self._names.tied)
        self._receiver = Receiver(layout, self._held, name=self.name)

    def targets(self) -> dict[str, torch.Tensor]:
        return self._state().targets()

    def begin(self, header: SyncHeader) -> None:
        self._trusted = self._syncing = None
        self._as_loaded = False
        self._state().begin(header)
        self._syncing = header.version

    def receive(self, delivery: Delivery) -> None:
        self._state().receive(delivery)

    def commit(self) -> Ack:
        self._syncing = None
        return self._state().commit(self._read_back)

    def cancel(self) -> None:
        self._trusted = self._syncing = None
        if self._receiver is not None:
            self._receiver.cancel()

    def release(self) -> int:
        """Free the parameters' memory; returns bytes freed. Buffers stay: no sync could bring back most of them."""
        self.cancel()
        self._as_loaded = False
        freed = 0
        if self._lean is not None:
            self._lean.split()
        for p in self.lm.parameters():
            if not p.untyped_storage().resizable():  # a view of the model file, or of what numpy has looked at
                p.data = torch.empty_like(p.data)
            freed += p.untyped_storage().nbytes()
            p.untyped_storage().resize_(0)
        return freed

    def restore(self) -> int:
        """Take the memory back; returns bytes taken. Its content is garbage until the next full sync."""
        before = after = 0
        for p in self.lm.parameters():  # several may be views of one storage
            needed, storage = (p.storage_offset() + p.numel()) * p.element_size(), p.untyped_storage()
            if storage.nbytes() < needed:
                before, after = before + storage.nbytes(), after + needed
                storage.resize_(needed)
        if self._lean is not None:
            self._lean.fuse()
        return after - before

    def _held(self) -> dict[str, torch.Tensor]:
        return dict(self._views(dict(named_weights(self.lm)) | persistent_buffers(self.lm)))

    def _views(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the model's tensors by the names of its files: a joint tensor of experts is several there."""
        for name, tensor in tensors.items():
            for hub_name, _, view in self._names.split(name, (0,) * tensor.dim(), tensor.detach()):
                yield hub_name, view

    def _read_back(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every name of every parameter, and every persistent buffer, each of which is what is computed with.

        Raises: SyncError naming one that lies apart from the joint tensor that is multiplied in its place.
        """
        joint = {} if self._lean is None else self._lean.joint()
        read: dict[int, list[torch.Tensor]] = {}  # of a parameter: a tied one is the same object under each name
        for name, p in named_weights(self.lm, remove_duplicate=False):
            if joint.get(id(p), p).data_ptr() != p.data_ptr():
                raise SyncError(
                    f"{self.name}: {name} lies apart from the joint tensor that is multiplied in its place, so one of "
                    "them has missed this sync; this receiver stays unusable: build a new engine"
                )
            if id(p) not in read:
                read[id(p)] = [view for _, view in self._views({name: p})]
            yield from zip(self._names.of(name), read[id(p)], strict=True)
        yield from self._views(persistent_buffers(self.lm))

    def _state(self) -> Receiver:
        if self._receiver is None:
            raise SyncError(f"{self.name}: a sync came before reconcile; send the layout once, before the first sync")
        return self._receiver
