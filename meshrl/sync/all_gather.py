"""Transfers between ranks that train and sample, as one all-gather for each window: every rank gets the transfers of
all senders into one piece of its device's memory. A server on the same device reads them there.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from meshrl.core.device import abort_group, exports_memory, separate_group, synchronize, transfer_device
from meshrl.core.errors import SyncInterrupted
from meshrl.parallel.store import listening_store
from meshrl.sync.delivery import Address, Delivery, Transport, delivery_from_facts, facts_bytes
from meshrl.sync.layout import Layout, Transfer, aligned
from meshrl.sync.shared_memory import DeviceMemory, SharedRing

_HANDLE_BYTES = 4096  # more than the text of a handle has


class AllGather(Transport):
    """One rank's end. The ranks of a replica form groups, in which rank s is sender s; after a sync that failed they
    form new ones, because an unfinished collective ends only with its group.

    The ranks exchange the facts of a window before its bytes, so no rank's memory changes before all ranks, and their
    servers, have read the window before.
    """

    def __init__(
        self,
        layout: Layout,
        sender: int,
        host: str,
        device: torch.device,
        timeout_s: float,
        num_workers: int = 0,
        replica: Any = None,
    ):
        """host: the address under which other ranks reach this machine. timeout_s: for forming a group, and for one
        collective. num_workers: of a server, each on the device of a rank, that meshrl has started on this machine;
        they open the transfers where they are if they can, else the server gets copies. replica: the process group of
        these ranks, for accelerators that can't form a `separate_group`. Raises: SyncError when shared memory is too
        small."""
        self._sender, self._host, self._device, self._num_workers = sender, host, device, num_workers
        self._timeout, self._replica = datetime.timedelta(seconds=timeout_s), replica
        self._num_senders = len(layout.senders)
        self._connection_id = self._prepared = ""
        self._store: dist.TCPStore | None = None
        self._groups: dict[str, Any] = {}  # by device type
        self._slot = torch.empty(aligned(layout.slot_bytes), dtype=torch.uint8, device=device)
        size = self._num_senders * aligned(layout.slot_bytes)
        self._shared: SharedRing | DeviceMemory | None = None
        if num_workers and device.type == "cpu":
            self._shared = SharedRing(1, size)
        elif num_workers and exports_memory(device) and self._num_senders % num_workers == 0:
            self._shared = DeviceMemory(torch.empty(size, dtype=torch.uint8, device=device))
        self._window = torch.empty(size, dtype=torch.uint8, device=device) if self._shared is None else None
        self.num_bytes = self._slot.numel() + size

    def prepare(self, connection_id: str) -> Address | None:
        """The address of sender 0, at which all ranks form their groups."""
        if self._sender or self._num_senders == 1:
            return None
        if self._store is None or connection_id != self._prepared:
            self.disconnect()
            self._store, self._prepared = listening_store(self._host, self._timeout), connection_id
        return Address(host=self._host, port=self._store.port, for_groups=True)

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Form the groups, and exchange the handles of the devices' memory; with an unchanged connection_id, nothing.
        Waits for: the other ranks. Raises: SyncError."""
        if connection_id == self._connection_id:
            return
        if self._sender:
            self.disconnect()  # sender 0 has done it in `prepare`
        if self._num_senders > 1:
            at = self.prepare(connection_id) or senders[0]

            def join() -> dict[str, Any]:
                store = dist.TCPStore(at.host, at.port, is_master=False, timeout=self._timeout)
                groups = {}
                for device in dict.fromkeys((torch.device("cpu"), self._device)):
                    if device != transfer_device(device):
                        groups[device.type] = self._replica
                        continue
                    prefixed = dist.PrefixStore(device.type, store)
                    groups[device.type] = separate_group(
                        prefixed, self._sender, self._num_senders, device, self._timeout
                    )
                return groups

            try:
                self._groups = await asyncio.to_thread(join)
            except RuntimeError as error:
                raise SyncInterrupted(
                    f"the train ranks' groups for weights, at {at.host}:{at.port}, can't be formed: {error}"
                ) from error
        self._connection_id = connection_id
        if isinstance(self._shared, DeviceMemory):
            own = bytearray(self._shared.handle.ljust(_HANDLE_BYTES), "ascii")
            handles = await self._gather(torch.frombuffer(own, dtype=torch.uint8))
            texts = [bytes(handle.tolist()).decode().rstrip() for handle in handles]
            self._shared.handles = tuple(texts[self._sender : self._sender + self._num_workers])

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
            await self._run(gathered, self._slot[:size])
        if self._shared is not None:
            synchronize(self._device)  # the server's stream does not wait for this one
        return [self._placed(delivery, gathered) for delivery in deliveries]

    def disconnect(self) -> None:
        """Leave the groups, which ends them for all members."""
        self._connection_id = self._prepared = ""
        for group in self._groups.values():
            if group is not self._replica:
                abort_group(group)
        self._groups, self._store = {}, None

    def close(self) -> None:
        self.disconnect()
        if self._shared is not None:
            self._shared.close()
        self._shared = self._window = None

    @property
    def _memory(self) -> torch.Tensor:
        memory = self._window if self._shared is None else self._shared.slots[0]
        assert memory is not None, "the transport is closed"
        return memory

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
        if self._num_senders == 1:
            gathered[0].copy_(own)
            return
        try:
            work = self._groups[own.device.type]._allgather_base(gathered.view(-1), own)
            await asyncio.to_thread(work.wait)
        except RuntimeError as error:
            raise SyncInterrupted(f"the weights of sender {self._sender} could not be gathered: {error}") from error
