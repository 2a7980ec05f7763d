"""Joins the transfers of one sync to full tensors, each verified before it is used. Independent of any model."""

from __future__ import annotations

import time
from typing import Any

import torch

from meshrl.sync.delivery import Progress, delivery_from_json
from meshrl.sync.digest import digest_bytes
from meshrl.sync.layout import Layout, SyncHeader, TensorSpec
from meshrl.sync.shared_memory import SharedRingView
from meshrl.sync.threads import lap


class Assembly:
    """Takes the transfers of one sync in order. Each tensor gets memory of its own, because a loader that waits for a
    complete layer may still need it when the transfer's memory is used again."""

    def __init__(self, layout: Layout, header: SyncHeader, name: str):
        """name: the receiver's name in errors."""
        self.header = header
        self._progress = Progress(layout, header, name)
        self.seconds = self._progress.seconds
        self._layout = layout
        self._views: dict[str, SharedRingView] = {}  # of the senders' shared memory
        self._open: dict[str, torch.Tensor] = {}  # incomplete tensors
        self._missing = {tensor.name: tensor.num_bytes for tensor in layout.tensors}

    def take(self, message: dict[str, Any]) -> list[tuple[TensorSpec, torch.Tensor]]:
        """The tensors that a transfer in shared memory completes. message: of `delivery_to_json`. Raises: SyncError."""
        ring = message["ring"]
        if ring not in self._views:
            self._views[ring] = SharedRingView(ring, message["num_slots"], message["slot_bytes"])
        delivery = delivery_from_json(self._layout, message, self._views[ring].slots[message["slot"]])
        self._progress.check(delivery)
        complete = []
        for number, (part, _, section) in enumerate(delivery.sections()):
            started_at = time.perf_counter()
            arrived = digest_bytes(self._layout.digest, section)
            started_at = lap(self.seconds, "verify", started_at)
            self._progress.require(delivery.digests[number], arrived, delivery.transfer, part)
            tensor, name = part.tensor, part.tensor.name
            if name not in self._open:
                self._open[name] = torch.empty(tensor.shape, dtype=tensor.torch_dtype)
            part.of(self._open[name]).copy_(section.view(tensor.torch_dtype).view(part.shape))
            self._missing[name] -= part.num_bytes
            lap(self.seconds, "load", started_at)
            if self._missing[name] == 0:
                complete.append((tensor, self._open.pop(name)))
        return complete

    def finish(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """After the last transfer: returns the tensors without elements, which no transfer contains. Raises: SyncError
        when transfers are missing."""
        self._progress.check_complete()
        self.close()
        return [(t, torch.empty(t.shape, dtype=t.torch_dtype)) for t in self._layout.tensors if t.num_bytes == 0]

    def close(self) -> None:
        """Unmap the senders' memory."""
        for view in self._views.values():
            view.close()
        self._views.clear()
