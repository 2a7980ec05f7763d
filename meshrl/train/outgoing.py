"""How one train rank's weights leave it, sync after sync: to the sampler beside it, or to those in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshrl.sync.exchange import Exchange
from meshrl.sync.manifest import Layout, SyncHeader
from meshrl.sync.receive import Bucket
from meshrl.sync.remote_ring import RingServer
from meshrl.sync.send import make_header
from meshrl.sync.shards import SendReport, ShardSender
from meshrl.sync.transport import BucketRef, SharedRing
from meshrl.train.engine import TrainEngine

RING_SLOTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a rank tells its receivers. ring: the name of its shared memory, None when another replica sends this shard.
    base_version: the version that it could send the changes since; None = none."""

    ring: str | None
    base_version: int | None


class Outgoing:
    """keep_base: remember what was sent, so that the next sync can send changes alone. one_machine: all ranks share
    its memory. address: under which other machines reach this one."""

    def __init__(self, trainer: TrainEngine, *, keep_base: bool, one_machine: bool, address: str):
        self._trainer, self._keep_base, self._one_machine, self._address = trainer, keep_base, one_machine, address
        self._layout: Layout | None = None
        self._sender: ShardSender | None = None
        self._exchange: Exchange | None = None
        self._ring: SharedRing | None = None
        self._server: RingServer | None = None
        self._buckets: Iterator[Bucket] | None = None

    # ---- to the sampler in this process

    def beside(
        self, layout: Layout, version: int, held: int, targets: Mapping[str, torch.Tensor]
    ) -> tuple[SyncHeader, Iterator[Bucket]]:
        """The header and all buckets for a sampler that holds version `held` in these tensors (collective, like the
        iteration). A rank that holds whole tensors writes them itself."""
        sender = self._prepared(layout, beside=True)
        if self._exchange is None:
            return make_header(layout, version), sender.in_place(self._trainer.shards(), targets)
        can = torch.tensor(int(held >= 0 and sender.base_version == held), device=self._trainer.device)
        dist.all_reduce(can, dist.ReduceOp.MIN)
        delta = bool(can.item())
        own = sender.buckets(self._trainer.shards(), version, delta)
        header = make_header(layout, version, None, held if delta else None, "delta" if delta else "full")
        return header, self._exchange.buckets(own)

    def report(self) -> SendReport:
        """What the last sync sent from here, and what that took."""
        assert self._sender is not None, "a report comes after a sync"
        report = self._sender.report
        report.seconds["gather"] = 0.0 if self._exchange is None else self._exchange.seconds
        return report

    # ---- to samplers in other processes

    def begin(self, layout: Layout) -> Source:
        """Have the shared memory ready."""
        if self._trainer.mesh["dp_replicate"].get_local_rank():
            return Source(ring=None, base_version=None)
        base = self._prepared(layout, beside=False).base_version
        ring = self._server or self._ring
        assert ring is not None
        self._buckets = None
        return Source(ring=ring.name, base_version=base)

    def next(self, version: int, delta: bool) -> BucketRef | SendReport:
        """Lay the next bucket into shared memory and say where it lies; after the last, what was sent."""
        assert self._sender is not None and self._ring is not None, "next comes after begin"
        if self._buckets is None:
            self._buckets = self._sender.buckets(self._trainer.shards(), version, delta)
        bucket = next(self._buckets, None)
        return self.report() if bucket is None else self._ring.ref(bucket)

    # ----

    def _prepared(self, layout: Layout, beside: bool) -> ShardSender:
        """The sender of this layout, and its buffers."""
        if self._sender is not None and self._layout == layout:
            return self._sender
        self.close()
        mesh = self._trainer.mesh["dp_shard"]
        self._layout = layout
        staging: Sequence[torch.Tensor] = ()
        if beside and mesh.size() > 1:
            shared = self._one_machine and self._trainer.device.type == "cpu"
            self._exchange = Exchange(layout, mesh.get_group(), self._trainer.device, shared)
            staging = self._exchange.staging
        elif not beside:
            self._ring = SharedRing(RING_SLOTS, layout.staging_bytes)
            if not self._one_machine:
                self._server = RingServer(self._ring, self._address)
            staging = self._ring.slots
        self._sender = ShardSender(layout, mesh.get_local_rank(), staging, self._keep_base)
        return self._sender

    def close(self) -> None:
        """Free the buffers; nothing is under way."""
        for held in (self._exchange, self._server, self._ring):
            if held is not None:
                held.close()
        self._sender = self._exchange = self._server = self._ring = self._buckets = None
