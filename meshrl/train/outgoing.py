"""How one train rank's weights leave it, sync after sync: to the sampler beside it, or to those in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from meshrl.core.device import wire_device
from meshrl.model.lora import is_adapter
from meshrl.sync.exchange import Exchange
from meshrl.sync.file_ring import FileRing
from meshrl.sync.group_ring import GroupRing
from meshrl.sync.manifest import Layout, SyncHeader, SyncMode
from meshrl.sync.receive import Bucket
from meshrl.sync.remote_ring import RingServer
from meshrl.sync.send import make_header
from meshrl.sync.shards import Rows, SendReport, ShardSender
from meshrl.sync.transport import BucketRef, SharedRing
from meshrl.train.engine import TrainEngine

RING_SLOTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a rank tells its receivers. ring: the name of its transport, None when another replica sends this shard.
    base_version: the version that it could send the changes since; None = none. mode: of a sync of changes alone."""

    ring: str | None
    base_version: int | None
    mode: SyncMode


@dataclass(frozen=True, slots=True)
class Transport:
    """How buckets reach other processes. folder: as files in it; broadcast: to all at once. Neither: shared memory, and
    TCP to other machines."""

    folder: Path | None = None
    broadcast: bool = False


class Outgoing:
    """keep_base: remember what was sent, so that the next sync can send changes alone. one_machine: all ranks share
    its memory. address: under which other machines reach this one. timeout_s: of each wait for who receives."""

    def __init__(
        self,
        trainer: TrainEngine,
        transport: Transport,
        *,
        keep_base: bool,
        one_machine: bool,
        address: str,
        timeout_s: float,
    ):
        self._trainer, self._transport, self._keep_base = trainer, transport, keep_base
        self._one_machine, self._address, self._timeout_s = one_machine, address, timeout_s
        self._layout: Layout | None = None
        self._merged = False
        self._sender: ShardSender | None = None
        self._exchange: Exchange | None = None
        self._ring: SharedRing | FileRing | GroupRing | None = None
        self._server: RingServer | None = None
        self._shards: Mapping[str, Rows] = {}
        self._buckets: Iterator[Bucket] | None = None

    # ---- to the sampler in this process

    def beside(
        self, layout: Layout, version: int, held: int | None, targets: Mapping[str, torch.Tensor] | None
    ) -> tuple[SyncHeader, Iterator[Bucket]]:
        """The header and all buckets for the sampler in this process, which holds version `held` (collective, like the
        iteration); None = there is none, and this rank only gives its shard.

        targets: the sampler's own tensors, which a rank that holds whole ones writes itself; None = they are in yet
        another process.
        """
        in_place = targets is not None and self._trainer.mesh["dp_shard"].size() == 1
        sender = self._prepared(layout, "in place" if in_place else "exchange")
        base = sender.base_version
        can = torch.tensor(int(base is not None and held in (base, None)), device=self._trainer.device)
        dist.all_reduce(can, dist.ReduceOp.MIN)
        changes = bool(can.item())
        header = make_header(layout, version, None, base if changes else None, self._mode if changes else "full")
        shards = self._trainer.shards(self._merged)
        if in_place:
            assert targets is not None
            return header, sender.in_place(shards, targets, version, changes)
        assert self._exchange is not None
        return header, self._exchange.buckets(sender.buckets(shards, version, changes))

    def report(self) -> SendReport:
        """What the last sync sent from here, and what that took."""
        assert self._sender is not None, "a report comes after a sync"
        report = self._sender.report
        report.seconds["gather"] = 0.0 if self._exchange is None else self._exchange.seconds
        return report

    # ---- to samplers in other processes

    def begin(self, layout: Layout, occasion: str, num_receivers: int) -> Source:
        """Have the transport ready. occasion: another one where receivers have come, gone or broken off since."""
        if self._trainer.mesh["dp_replicate"].get_local_rank():
            return Source(ring=None, base_version=None, mode=self._mode)
        base = self._prepared(layout, "ring").base_version
        ring = self._server or self._ring
        assert ring is not None
        if isinstance(ring, GroupRing):
            ring.gather(occasion, num_receivers)
        self._buckets, self._shards = None, self._trainer.shards(self._merged)
        return Source(ring=ring.name, base_version=base, mode=self._mode)

    def next(self, version: int, changes: bool) -> BucketRef | SendReport:
        """Put the next bucket on its way and say where it is to be found; after the last, what was sent."""
        assert self._sender is not None and self._ring is not None, "next comes after begin"
        if self._buckets is None:
            self._buckets = self._sender.buckets(self._shards, version, changes)
        bucket = next(self._buckets, None)
        return self.report() if bucket is None else self._ring.ref(bucket)

    # ----

    def _prepared(self, layout: Layout, way: Literal["in place", "exchange", "ring"]) -> ShardSender:
        """The sender of this layout, and its buffers."""
        if self._sender is not None and self._layout == layout:
            return self._sender
        self.close()
        mesh = self._trainer.mesh["dp_shard"]
        self._layout = layout
        has_adapters = any(is_adapter(entry.name) for entry in layout.entries)
        self._merged = self._trainer.lora is not None and not has_adapters
        staging: Sequence[torch.Tensor] = ()
        if way == "exchange":
            shared = self._one_machine and self._trainer.device.type == "cpu"
            self._exchange = Exchange(layout, mesh.get_group(), self._trainer.device, shared)
            staging = self._exchange.staging
        elif way == "ring":
            self._ring = self._opened(layout.staging_bytes)
            staging = self._ring.slots
        frozen = frozenset() if self._merged else self._trainer.frozen
        self._sender = ShardSender(layout, mesh.get_local_rank(), staging, self._keep_base, frozen)
        return self._sender

    @property
    def _mode(self) -> SyncMode:
        """Of a sync of changes alone."""
        return "adapter" if self._trainer.lora is not None and not self._merged else "delta"

    def _opened(self, slot_bytes: int) -> SharedRing | FileRing | GroupRing:
        if self._transport.folder is not None:
            return FileRing(RING_SLOTS, slot_bytes, self._transport.folder)
        if self._transport.broadcast:
            host = "127.0.0.1" if self._one_machine else self._address
            return GroupRing(RING_SLOTS, slot_bytes, wire_device(self._trainer.device), host, self._timeout_s)
        ring = SharedRing(RING_SLOTS, slot_bytes)
        if not self._one_machine:
            self._server = RingServer(ring, self._address)
        return ring

    def close(self) -> None:
        """Free the buffers; nothing is under way."""
        for held in (self._exchange, self._server, self._ring):
            if held is not None:
                held.close()
        self._sender = self._exchange = self._server = self._ring = self._buckets = None
