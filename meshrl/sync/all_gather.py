"""Transfers between ranks that train and sample, as one all-gather for each window: every rank gets the transfers of
all senders into one piece of its device's memory. A server on the same device reads them there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from meshrl.core.device import exports_memory, synchronize
from meshrl.core.errors import SyncInterrupted
from meshrl.sync.delivery import Address, Delivery, Transport, delivery_from_facts, facts_bytes
from meshrl.sync.layout import Layout, Transfer, aligned
from meshrl.sync.shared_memory import DeviceMemory, SharedRing

_HANDLE_BYTES = 4096  # more than the text of a handle has


class AllGather(Transport):
    """One rank's end. group: of all ranks of a replica, in which rank s is sender s.

    The ranks exchange the facts of a window before its bytes, so no rank's memory changes before all ranks, and their
    servers, have read the window before.
    """

    collective = True

    def __init__(self, layout: Layout, sender: int, group: Any, device: torch.device, for_server: bool):
        """for_server: whether another process of this machine reads the transfers. Raises: SyncError when shared memory
        is too small. On accelerators whose memory other processes can't open, the server gets copies."""
        self._sender, self._group, self._device = sender, group, device
        self._num_senders = len(layout.senders)
        self._slot = torch.empty(layout.slot_bytes, dtype=torch.uint8, device=device)
        size = self._num_senders * aligned(layout.slot_bytes)
        self._shared: SharedRing | DeviceMemory | None = None
        if for_server and device.type == "cpu":
            self._shared = SharedRing(1, size)
        elif for_server and exports_memory(device):
            self._shared = DeviceMemory(torch.empty(size, dtype=torch.uint8, device=device))
        self._window = torch.empty(size, dtype=torch.uint8, device=device) if self._shared is None else None
        self.num_bytes = self._slot.numel() + size

    def prepare(self, connection_id: str) -> Address | None:
        """None: the group exists."""
        return None

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Nothing to do, except that servers need the memory of all ranks of their devices."""
        if isinstance(self._shared, DeviceMemory) and not self._shared.handles:
            own = bytearray(self._shared.handle.ljust(_HANDLE_BYTES), "ascii")
            handles = await self._gather(torch.frombuffer(own, dtype=torch.uint8))
            texts = [bytes(handle.tolist()).decode().rstrip() for handle in handles]
            self._shared.handles = (*texts[self._sender :], *texts[: self._sender])

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        return self._slot

    async def exchange(self, window: Sequence[Transfer], filled: Delivery | None, receives: bool) -> list[Delivery]:
        """Gather the facts of all transfers of the window, then their bytes."""
        lengths = [facts_bytes(transfer) for transfer in window]
        facts = torch.zeros(max(lengths), dtype=torch.uint8)
        if filled is not None:
            own = filled.facts()
            facts[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        by_sender = await self._gather(facts)
        deliveries = [delivery_from_facts(t, by_sender[t.sender].numpy().tobytes(), self._slot) for t in window]
        size = aligned(max(delivery.num_bytes for delivery in deliveries))
        gathered = self._memory[: self._num_senders * size].view(self._num_senders, size)
        if size:
            await self._run(gathered, self._slot_of(size))
        if self._shared is not None:
            synchronize(self._device)  # the server's stream does not wait for this one
        return [self._placed(delivery, gathered) for delivery in deliveries]

    def disconnect(self) -> None:
        """Nothing to do: the group ends with its ranks."""

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self._shared = self._window = None

    @property
    def _memory(self) -> torch.Tensor:
        memory = self._window if self._shared is None else self._shared.slots[0]
        assert memory is not None, "the transport is closed"
        return memory

    def _slot_of(self, size: int) -> torch.Tensor:
        """The own transfer, padded to the length of the window's longest one."""
        if size > self._slot.numel():
            self._slot = torch.cat([self._slot, self._slot.new_zeros(size - self._slot.numel())])
        return self._slot[:size]

    def _placed(self, delivery: Delivery, gathered: torch.Tensor) -> Delivery:
        sender = delivery.transfer.sender
        payload = gathered[sender][: delivery.num_bytes]
        if self._shared is None:
            return replace(delivery, payload=payload)
        address = replace(self._shared.slot_address(0), at=sender * gathered.shape[1])
        return replace(delivery, payload=payload, slot_address=address)

    async def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, in host memory: [senders, *own.shape]."""
        gathered = own.new_empty(self._num_senders, *own.shape)
        await self._run(gathered, own)
        return gathered

    async def _run(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        try:
            work = self._group._allgather_base(gathered.view(-1), own)
            await asyncio.to_thread(work.wait)
        except RuntimeError as error:
            raise SyncInterrupted(f"the weights of sender {self._sender} could not be gathered: {error}") from error
