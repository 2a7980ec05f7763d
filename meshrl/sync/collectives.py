"""Transfers in process groups that all ranks form at the address of sender 0: broadcasts to separate samplers, and
all-gathers among ranks that train and sample. A group can't be joined later, and an unfinished collective ends only
with its group: a rank that replaces a failed one, and a sync after one that failed, need new groups.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from meshrl.core.device import abort_group, exports_memory, separate_group, synchronize, transfer_device
from meshrl.core.errors import SyncInterrupted
from meshrl.parallel.exchange import listening_store
from meshrl.sync.delivery import NUM_SLOTS, Address, Delivery, Transport, delivery_from_facts, facts_bytes
from meshrl.sync.layout import Layout, Transfer, aligned
from meshrl.sync.shared_memory import DeviceMemory, SharedRing

_HANDLE_BYTES = 4096  # more than the text of a handle has


class Collectives(Transport):
    """One rank's end of its groups, one for each kind of device, in which sender s has rank s and receivers that do not
    send come after the senders."""

    def __init__(self, layout: Layout, sender: int | None, host: str, device: torch.device, timeout_s: float):
        """sender: this rank's number among the senders; None = it only receives. host: the address under which other
        ranks reach this machine. timeout_s: for forming a group, and for one collective."""
        self._sender, self._host, self._device, self._num_senders = sender, host, device, len(layout.senders)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._devices = [device]
        self._connection_id = self._prepared = ""
        self._store: dist.TCPStore | None = None
        self._groups: dict[str, Any] = {}  # by device type
        self._replica: Any = None  # a group of another owner, for devices without one here
        self._size = self._num_senders  # of the groups

    def prepare(self, connection_id: str) -> Address | None:
        """The address of sender 0, at which all ranks form their groups."""
        if self._sender != 0:
            return None
        if self._store is None or connection_id != self._prepared:
            self.disconnect()
            self._store, self._prepared = listening_store(self._host, self._timeout), connection_id
        return Address(host=self._host, port=self._store.port, for_groups=True)

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Form the groups; with an unchanged connection_id, keep them. Waits for: their members."""
        if connection_id == self._connection_id:
            return
        if self._sender != 0:
            self.disconnect()  # sender 0 has done it in `prepare`
        at = self.prepare(connection_id) or senders[0]
        size = self._size = self._num_senders + num_receivers
        rank = self._num_senders + number if self._sender is None else self._sender

        def join() -> dict[str, Any]:
            with _interrupted(f"the groups of the senders and receivers at {at.host}:{at.port} can't be formed"):
                store = dist.TCPStore(at.host, at.port, is_master=False, timeout=self._timeout)
                prefixed = [(device, dist.PrefixStore(device.type, store)) for device in self._devices]
                return {d.type: separate_group(own, rank, size, d, self._timeout) for d, own in prefixed}

        self._groups = await asyncio.to_thread(join)
        self._connection_id = connection_id

    async def _facts(self, window: Sequence[Transfer], filled: Delivery | None, device: torch.device) -> Any:
        """[ranks, bytes]: the facts of the transfers of this window, in host memory."""
        facts = torch.zeros(max(map(facts_bytes, window)), dtype=torch.uint8)
        if filled is not None:
            own = filled.facts()
            facts[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return (await self._gather(facts.to(device))).cpu().numpy()

    async def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks: [ranks, *own.shape]."""
        gathered = own.new_empty(self._size, *own.shape)
        await self._run(gathered, own)
        return gathered

    async def _run(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        with _interrupted("a window could not be gathered"):
            await asyncio.to_thread(self._group(own.device)._allgather_base(gathered.view(-1), own).wait)

    def _group(self, device: torch.device) -> Any:
        """To be called only where it is used: a group of gloo ends with the last reference to it, and the traceback of
        an error has references to all variables."""
        return self._groups.get(device.type, self._replica)

    def disconnect(self) -> None:
        """Leave the groups, which ends them for all members."""
        self._connection_id = self._prepared = ""
        for group in self._groups.values():
            abort_group(group)
        self._groups, self._store = {}, None


class Broadcast(Collectives):
    """Broadcasts over gloo or the accelerator's own backend. A sender sends its bytes once, whatever the number of
    receivers. It gets the transfers of other senders, too, and has memory for each, because gloo forwards them from
    there: two buckets of memory in each rank."""

    double_buffered = True

    def __init__(self, layout: Layout, sender: int | None, host: str, device: torch.device, timeout_s: float):
        super().__init__(layout, sender, host, device, timeout_s)
        self._slot_bytes = layout.slot_bytes
        self._slots: dict[tuple[int, int], torch.Tensor] = {}  # by sender and slot
        self._sending: deque[list[Any]] = deque()  # of the newest windows

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        await self._finish(NUM_SLOTS - 1)
        return self._slot(transfer)

    async def exchange(self, window: Sequence[Transfer], filled: Delivery | None, receives: bool) -> list[Delivery]:
        """Gather the facts of all transfers of the window, then broadcast each transfer."""
        await self._finish(NUM_SLOTS - 1)
        by_sender = await self._facts(window, filled, self._device)
        with _interrupted(f"the window of {window[0]} could not be broadcast"):
            deliveries = [delivery_from_facts(t, by_sender[t.sender].tobytes(), self._slot(t)) for t in window]
            sent = [delivery for delivery in deliveries if delivery.num_bytes]
            self._sending.append(
                [self._group(self._device).broadcast(each.payload, each.transfer.sender) for each in sent]
            )
        if not receives:
            return []
        await self._finish(0)
        return deliveries

    def disconnect(self) -> None:
        self._sending.clear()
        super().disconnect()

    def close(self) -> None:
        self.disconnect()
        self._slots = {}

    def _slot(self, transfer: Transfer) -> torch.Tensor:
        key = transfer.sender, transfer.index % NUM_SLOTS
        if key not in self._slots:
            self._slots[key] = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
            self.num_bytes += self._slot_bytes
        return self._slots[key]

    async def _finish(self, num_left: int) -> None:
        """Wait for all windows but the newest ones."""
        while len(self._sending) > num_left:
            with _interrupted("a window could not be broadcast"):
                for work in self._sending.popleft():
                    await asyncio.to_thread(work.wait)


class AllGather(Collectives):
    """Transfers between ranks that train and sample, as one all-gather for each window: every rank gets the transfers
    of all senders into one piece of its device's memory. A server on the same device reads them there.

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
        """num_workers: of a server, each on the device of a rank, that meshrl has started on this machine; they open
        the transfers where they are if they can, else the server gets copies. replica: the process group of these
        ranks, for accelerators that can't form a `separate_group`."""
        super().__init__(layout, sender, host, device, timeout_s)
        cpu = torch.device("cpu")
        self._devices = [device for device in dict.fromkeys((cpu, device)) if device == transfer_device(device)]
        self._first, self._num_workers, self._replica = sender, num_workers, replica
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
        return None if self._num_senders == 1 else super().prepare(connection_id)

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Also exchange the handles of the devices' memory."""
        if connection_id == self._connection_id:
            return
        if self._num_senders > 1:
            await super().connect(connection_id, senders, 0, 0)
        self._connection_id = connection_id
        if isinstance(self._shared, DeviceMemory):
            own = bytearray(self._shared.handle.ljust(_HANDLE_BYTES), "ascii")
            handles = await self._gather(torch.frombuffer(own, dtype=torch.uint8))
            texts = [bytes(handle.tolist()).decode().rstrip() for handle in handles]
            self._shared.handles = tuple(texts[self._first : self._first + self._num_workers])

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        return self._slot

    async def exchange(self, window: Sequence[Transfer], filled: Delivery | None, receives: bool) -> list[Delivery]:
        """Gather the facts of all transfers of the window, then their bytes."""
        by_sender = await self._facts(window, filled, torch.device("cpu"))
        deliveries = [delivery_from_facts(t, by_sender[t.sender].tobytes(), self._slot) for t in window]
        size = aligned(max(delivery.num_bytes for delivery in deliveries))
        gathered = self._memory[: self._num_senders * size].view(self._num_senders, size)
        if size:
            await self._run(gathered, self._slot[:size])
        if self._shared is not None:
            synchronize(self._device)  # the server's stream does not wait for this one
        return [self._placed(delivery, gathered) for delivery in deliveries]

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

    async def _run(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        if self._num_senders == 1:
            gathered[0].copy_(own)
            return
        await super()._run(gathered, own)


@contextmanager
def _interrupted(failure: str) -> Iterator[None]:
    """Raises: SyncInterrupted with this text for an error of a process group."""
    try:
        yield
    except RuntimeError as error:
        raise SyncInterrupted(f"{failure}: {error}") from error
