"""One rank's part in weight syncs: it sends the weights of its train engine, and its sampler receives weights.

The train engines of a rank and a colocated sampler use the memory of their device in turns:

    for_training -> train -> make_room(weights) -> restore_sampler(weights) -> send the weights
    -> make_room(kv_cache) -> restore_sampler(kv_cache) -> sample -> for_training

The controller calls make_room in all ranks before any of them goes on, because a sampler may be another process on the
devices of several ranks. Parameters that are offloaded (train.param_offload) are on the host from make_room(kv_cache)
until make_room(weights) or for_training. Frozen parameters that trainer and sampler share stay on the device, since one
of the two always computes with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from meshrl.cluster.executor import WorkerSpec
from meshrl.core.device import empty_cache, has_own_memory, return_freed_memory, transfer_device
from meshrl.core.errors import SyncError, SyncInterrupted
from meshrl.core.types import POLICY
from meshrl.parallel.mesh import replica_group
from meshrl.process.connect import LOOPBACK
from meshrl.rollout.base import RolloutEngine
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.sync.collectives import AllGather, Broadcast
from meshrl.sync.delivery import Transport
from meshrl.sync.layout import Ack, Layout
from meshrl.sync.sender import SendReport, WeightSender
from meshrl.sync.sockets import Sockets
from meshrl.sync.transaction import SyncOrder, SyncState, sync_rank
from meshrl.train.engine import TrainEngine


class RankSync:
    """One object for each rank and layout."""

    def __init__(
        self,
        spec: WorkerSpec,
        device: torch.device,
        layout: Layout,
        trainer: TrainEngine | None,
        sampler: RolloutEngine | None,
    ):
        assert spec.rollout is not None, "weights are sent to samplers"
        self.layout = layout
        self._spec, self._cfg, self._device = spec, spec.rollout, device
        self._trainer, self._sampler = trainer, sampler
        self._takes_adapters = spec.rollout.takes_adapters(spec.model.lora)
        self._sender: WeightSender | None = None
        self._transport: Transport | None = None  # made by the first sync that needs it
        self._running: asyncio.Task[Ack | None] | None = None
        self._cancelled = False
        self._replica = 0 if trainer is None else trainer.coordinates.replica
        if trainer is not None and (self._colocated or not self._replica):  # else the first replica sends
            frozen = trainer.frozen() if self._takes_adapters else frozenset()
            keeps_base, shared = self._cfg.sync_mode == "delta", frozenset(self._shared())
            self._sender = WeightSender(layout, trainer.coordinates.sender, keeps_base, frozen, shared)

    def state(self, connection_id: str) -> SyncState:
        """This rank's state before the next sync. connection_id: as in SyncOrder."""
        version = None if self._sampler is None else self._sampler.stats().version
        if self._sender is None:
            return SyncState(version=version)
        transport = self._needed_transport()
        return SyncState(
            sender=self._sender.sender,
            replica=self._replica,
            address=None if transport is None else transport.prepare(connection_id),
            base_version=self._sender.base_version,
            version=version,
        )

    async def sync(self, order: SyncOrder) -> tuple[Ack | None, SendReport | None]:
        """Send, receive and verify weights (with a train engine, a collective).

        Waits for: the other ranks. Unblocked by: `cancel`, a lost rank.
        """
        self._cancelled = False
        self._running = asyncio.ensure_future(self._sync(order))
        try:
            return await self._running, None if self._sender is None else self._sender.report
        except BaseException as error:
            await self._abort()
            if isinstance(error, asyncio.CancelledError) and self._cancelled:
                raise SyncInterrupted(f"rank {self._spec.rank}: the sync was cancelled") from None
            raise
        finally:
            self._running = None

    async def _sync(self, order: SyncOrder) -> Ack | None:
        sampler, trainer = self._sampler, self._trainer
        weights = None
        if self._sender is not None and trainer is not None:
            weights = trainer.weights(merged=not self._takes_adapters)
            for name, tensor in self._shared().items():
                if weights.sources[name][0].elements.block.data_ptr() != tensor.data_ptr():
                    raise SyncError(f"{name} of trainer and sampler is no longer one tensor: an error in meshrl")
            self._sender.begin(weights.sources, changes=order.header.mode != "full")
        targets = sampler.targets if self._in_place and isinstance(sampler, EmbeddedEngine) else None
        ack = await sync_rank(order, self.layout, self._needed_transport(), self._sender, sampler, targets)
        if self._sender is not None and weights is not None:
            self._sender.report.lora_change = weights.rounded.sums()
        return ack

    async def cancel(self) -> None:
        """Cancel the running sync, if there is one, so that no other rank waits for this one. The sampler has no valid
        version then."""
        running = self._running
        if running is not None:
            self._cancelled = True
            running.cancel()
            await asyncio.wait({running})
            if running.cancelled() or running.exception() is not None:  # then `sync` calls _abort
                return
        await self._abort()  # also if the sync has just committed: other ranks may not have

    async def _abort(self) -> None:
        if self._transport is not None:
            self._transport.disconnect()
        if self._sampler is not None:
            await self._sampler.cancel()

    def close(self) -> None:
        """Free the buffers. No sync may be running."""
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    # ----

    @property
    def _colocated(self) -> bool:
        return self._spec.num_rollout_ranks == 0

    @property
    def _in_place(self) -> bool:
        """Whether this rank's train engine holds all weights and its sampler's tensors are in this process."""
        trainer = self._trainer
        alone = trainer is not None and trainer.coordinates.num_senders == 1
        return self._colocated and alone and isinstance(self._sampler, EmbeddedEngine)

    def _shared(self) -> dict[str, torch.Tensor]:
        """By wire name, the sampler's tensors that are the trainer's, too."""
        return self._sampler.shared if isinstance(self._sampler, EmbeddedEngine) else {}

    def _needed_transport(self) -> Transport | None:
        if self._transport is None and not self._in_place:
            self._transport = self._new_transport(None if self._sender is None else self._sender.sender)
        return self._transport

    def _new_transport(self, sender: int | None) -> Transport:
        """Shared memory and sockets; or an all-gather, if colocated ranks are on several machines or hold their weights
        on accelerators; or broadcasts, if the config selects them or NCCL connects the devices of both sides."""
        spec, timeout_s = self._spec, self._spec.deadline_s("sync") / 2  # fails before the rank misses its deadline
        host = LOOPBACK if spec.nodes == 1 else spec.address
        if self._trainer is not None and self._colocated and (spec.nodes > 1 or self._device.type != "cpu"):
            assert sender is not None, "colocated train ranks send"
            own_server = self._cfg.engine != "embedded" and self._cfg.uses_device
            reads = own_server and self._cfg.sync_mode == "full"  # else the rank reads them itself, or a user's server
            group = None if self._device == transfer_device(self._device) else replica_group(self._trainer.mesh)
            num_workers = self._cfg.tp_size if reads else 0
            return AllGather(self.layout, sender, host, self._device, timeout_s, num_workers, group)
        has_nccl = self._device.type != "cpu" and self._device == transfer_device(self._device)
        if not self._colocated and (self._cfg.sync_transport == "broadcast" or (has_nccl and self._cfg.uses_device)):
            return Broadcast(self.layout, sender, host, transfer_device(self._device), timeout_s)
        return Sockets(self.layout, sender, host, machine=spec.rank // spec.num_local_ranks, timeout_s=timeout_s)


class SharedDevice:
    """engines: by role; none in a rank that only samples. sampler: that of this rank, if it has one."""

    def __init__(
        self,
        spec: WorkerSpec,
        device: torch.device,
        engines: Mapping[str, TrainEngine],
        sampler: RolloutEngine | None,
    ):
        self._device, self._engines, self._sampler = device, engines, sampler
        colocated = spec.trains and spec.rollout is not None and spec.num_rollout_ranks == 0
        self._releases_sampler = colocated and spec.rollout is not None and bool(spec.rollout.release_memory)
        self._offloads = colocated and spec.train.param_offload and has_own_memory(device)
        self._on_host, self._shares_base = False, not spec.second_copy
        self.is_shared = self._releases_sampler or self._offloads

    def for_training(self) -> None:
        """Free the caches of a sampler without requests, because the next sync drops them anyway, and restore the
        parameters."""
        if isinstance(self._sampler, EmbeddedEngine) and not self._sampler.has_work:
            self._sampler.drop_caches()
        return_freed_memory(self._device)
        self._restore()

    def make_room(self, part: str) -> None:
        """Make room for this part of a sampler. While it gets its weights, the train engines have their parameters;
        from its kv_cache on, only what they need while it works."""
        if part == "weights":
            self._restore()
        elif self._offloads:
            self._on_host = True  # also if only a part of them is
            for name in self._engines:
                self._release(name)
        if self.is_shared:
            empty_cache(self._device)

    async def restore_sampler(self, part: str) -> None:
        """Restore this part of a sampler that has released its memory."""
        if self._releases_sampler and self._sampler is not None:
            await self._sampler.restore({part})

    @contextmanager
    def policy(self) -> Iterator[None]:
        """The policy's parameters are on the device during this block."""
        engine = self._engines[POLICY.name]
        engine.restore()
        try:
            yield
        finally:
            if self._on_host:
                self._release(POLICY.name)

    def _release(self, name: str) -> None:
        self._engines[name].release(frozen=not (self._shares_base and name == POLICY.name))

    def _restore(self) -> None:
        if self._on_host:
            for engine in self._engines.values():
                engine.restore()
            self._on_host = False
