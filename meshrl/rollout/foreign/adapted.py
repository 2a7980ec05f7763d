"""The weights of a server without adapters, for a trainer that sends adapters alone: the base and the adapters are kept
in this process, and the server gets their sum.

Two links, each proven: what came from the trainer, by its digests, as in any receiver; and W + s B A, computed here
from that, by digests of its own down to the server's parameters.

Memory: one copy of the weights in the sampler's dtype, of the host, for each replica.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from meshrl.core.errors import SyncError
from meshrl.model.lora import Adapter, MergedRows, adapter_names, is_adapter
from meshrl.rollout.foreign.weights import Call, RemoteWeights
from meshrl.sync.manifest import Ack, Layout, SyncHeader, make_layout
from meshrl.sync.receive import Bucket, Place, ReceiverState
from meshrl.sync.send import make_header
from meshrl.sync.shards import Rows, ShardSender
from meshrl.sync.transport import SharedRing


class AdaptedWeights(RemoteWeights):
    """RemoteWeights of a layout with adapters. Syncs of them alone need the base of one that was committed."""

    def __init__(self, call: Call, name: str, scale: float):
        """scale: of B A, alpha / rank."""
        super().__init__(call, name)
        self._scale = scale
        self._held: ReceiverState | None = None
        self._sender: ShardSender | None = None
        self._staging: SharedRing | None = None

    async def reconcile(self, layout: Layout) -> None:
        """As RemoteWeights, for the sums; the base and the adapters are given room here."""
        tensors = [(e.name, e.shape, e.dtype) for e in layout.entries if not is_adapter(e.name)]
        await super().reconcile(make_layout(tensors, layout.tied, layout.bucket_bytes, 1, layout.digest))
        room = {e.name: torch.empty(e.shape, dtype=getattr(torch, e.dtype)) for e in layout.entries}
        self._held = ReceiverState(layout, room, name=self.name)

    async def begin(self, header: SyncHeader) -> None:
        self._needed().begin(header)
        await super().begin(make_header(self._needed_layout(), header.version))

    async def receive(self, bucket: Bucket) -> None:
        self._needed().receive(bucket)

    async def commit(self) -> Ack:
        """Prove what came, add it up, and hand the sums on. Raises: SyncError."""
        held = self._needed()
        came = held.commit()
        sums, adding_s = self._sums(held.targets(), came.version), 0.0
        while True:
            began = time.perf_counter()
            bucket = next(sums, None)
            adding_s += time.perf_counter() - began
            if bucket is None:
                break
            await super().receive(bucket)
        ack = await super().commit()
        seconds = {part: ack.seconds[part] + came.seconds[part] for part in ack.seconds}
        seconds["load"] += adding_s
        return replace(came, resident=ack.resident, seconds=seconds)

    async def cancel(self) -> None:
        if self._held is not None:
            self._held.cancel()
        await super().cancel()

    def drop(self) -> None:
        if self._held is not None:
            self._held.cancel()
        super().drop()

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        self._staging = self._sender = self._held = None
        super().close()

    def _sums(self, held: dict[str, torch.Tensor], version: int) -> Iterator[Bucket]:
        """Every weight of the model that the server has, in buckets in shared memory."""
        layout = self._needed_layout()
        if self._sender is None or self._staging is None:
            self._staging = SharedRing(1, layout.staging_bytes)  # a bucket is taken before the next one is made
            self._sender = ShardSender(layout, 0, self._staging.slots, keep_base=False)
        ring = self._staging
        rows: dict[str, Rows] = {}
        for name, weight in held.items():
            if not is_adapter(name):
                a, b = adapter_names(name)
                rows[name] = MergedRows(weight, Adapter(held[a], held[b], self._scale)) if a in held else weight
        for bucket in self._sender.buckets(rows, version):
            place = Place(ring=ring.name, num_slots=ring.num_slots, slot_bytes=ring.slot_bytes, slot=0)
            yield replace(bucket, place=place)

    def _needed(self) -> ReceiverState:
        if self._held is None:
            raise SyncError(f"{self.name}: a sync came before reconcile; send the layout once, before the first sync")
        return self._held


def remote_weights(call: Call, name: str, keep: bool, adapter_scale: float | None) -> RemoteWeights:
    """keep: so that a sync may bring changes alone. adapter_scale: None = the trainer sends none."""
    if keep and adapter_scale is not None:
        return AdaptedWeights(call, name, adapter_scale)
    return RemoteWeights(call, name, keep)
