"""Joins the transfers of one sync to full tensors, each verified before it is used. Independent of any model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from meshrl.sync.delivery import Delivery, delivery_from_json
from meshrl.sync.digest import digest_bytes
from meshrl.sync.layout import Layout, SyncHeader, TensorSpec
from meshrl.sync.receiver import Progress
from meshrl.sync.shared_memory import SharedRingView


class Assembly:
    """Takes the transfers of one sync in order. Each tensor gets memory of its own, because a loader that waits for a
    complete layer may still need it when the transfer's memory is used again."""

    def __init__(self, layout: Layout, header: SyncHeader, name: str):
        """name: the receiver's name in errors."""
        self.header = header
        self.copy_s = 0.0
        self.progress = Progress(layout, header, name)
        self._layout = layout
        self._views: dict[str, SharedRingView] = {}  # of the senders' shared memory
        self._open: dict[str, torch.Tensor] = {}  # incomplete tensors
        self._missing = {tensor.name: tensor.num_bytes for tensor in layout.tensors}

    def take(self, message: dict[str, Any]) -> list[tuple[TensorSpec, torch.Tensor]]:
        """The tensors that a transfer in shared memory completes. message: of `delivery_to_json`. Raises: SyncError."""
        ring = message["ring"]
        if ring not in self._views:
            self._views[ring] = SharedRingView(ring, message["num_slots"], message["slot_bytes"])
        payload = self._views[ring].slot(message["slot"])
        delivery = delivery_from_json(self._layout, message, payload)
        return list(self._take(delivery))

    def _take(self, delivery: Delivery) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        self.progress.check(delivery)
        for number, (part, _, section) in enumerate(delivery.sections()):
            began = time.perf_counter()
            arrived = digest_bytes(self._layout.digest, section)
            self.progress.verify_s += time.perf_counter() - began
            self.progress.require(delivery, part, arrived, delivery.digests[number])
            began = time.perf_counter()
            tensor, name = part.tensor, part.tensor.name
            if name not in self._open:
                self._open[name] = torch.empty(tensor.shape, dtype=tensor.torch_dtype)
            part.of(self._open[name]).copy_(section.view(tensor.torch_dtype).view(part.shape))
            self._missing[name] -= part.num_bytes
            self.copy_s += time.perf_counter() - began
            if self._missing[name] == 0:
                yield tensor, self._open.pop(name)
        self.progress.loaded(delivery)

    def finish(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """After the last transfer: returns the tensors without elements, which no transfer contains. Raises: SyncError
        when transfers are missing."""
        self.progress.check_complete()
        self.close()
        return [(t, torch.empty(t.shape, dtype=t.torch_dtype)) for t in self._layout.tensors if t.num_bytes == 0]

    def close(self) -> None:
        """Unmap the senders' memory."""
        for view in self._views.values():
            view.close()
        self._views.clear()
