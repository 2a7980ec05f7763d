"""Transfers by broadcast, over gloo or the accelerator's own backend, in one process group of all senders and
receivers. A sender sends its bytes once, whatever the number of receivers. It gets the transfers of other senders, too,
and has memory for each, because gloo forwards them from there: two buckets of memory in each rank.

A group can't be joined later, so a rank that replaces a failed one needs a new group. An unfinished broadcast ends with
its group.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from meshrl.core.device import abort_group, separate_group
from meshrl.core.errors import SyncInterrupted
from meshrl.parallel.store import listening_store
from meshrl.sync.delivery import NUM_SLOTS, Address, Delivery, Transport, delivery_from_facts, facts_bytes
from meshrl.sync.layout import Layout, Transfer


class Broadcast(Transport):
    """One rank's end. In the group sender s has rank s, and the receivers come after the senders."""

    double_buffered = True

    def __init__(
        self,
        layout: Layout,
        sender: int | None,
        host: str,
        device: torch.device,
        timeout_s: float,
    ):
        """sender: this rank's number among the senders; None = it only receives. host: the address under which other
        ranks reach this machine. timeout_s: for forming the group, and for one broadcast."""
        self._sender, self._host, self._device = sender, host, device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._connection_id = self._prepared = ""
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._num_senders, self._size = len(layout.senders), 0
        self._slot_bytes = layout.slot_bytes
        self._slots: dict[tuple[int, int], torch.Tensor] = {}  # by sender and slot
        self._sending: deque[list[Any]] = deque()  # of the newest windows

    def prepare(self, connection_id: str) -> Address | None:
        """The address of sender 0, at which all ranks form their group."""
        if self._sender != 0:
            return None
        if self._store is None or connection_id != self._prepared:
            self.disconnect()
            self._store = listening_store(self._host, self._timeout)
            self._prepared = connection_id
        return Address(host=self._host, port=self._store.port, for_groups=True)

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Form the group; with an unchanged connection_id, keep it. Waits for: its members.

        Raises: SyncError.
        """
        if connection_id == self._connection_id:
            return
        if self._sender != 0:
            self.disconnect()  # sender 0 has done it in `prepare`
        at = self.prepare(connection_id) or senders[0]
        rank, self._size = self._sender, self._num_senders + num_receivers
        rank = self._num_senders + number if rank is None else rank

        def join() -> Any:
            with _interrupted(f"the group of the senders and receivers at {at.host}:{at.port} can't be formed"):
                store = dist.TCPStore(at.host, at.port, is_master=False, timeout=self._timeout)
                return separate_group(store, rank, self._size, self._device, self._timeout)

        self._group = await asyncio.to_thread(join)
        self._connection_id = connection_id

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        await self._finish(NUM_SLOTS - 1)
        return self._slot(transfer)

    async def exchange(self, window: Sequence[Transfer], filled: Delivery | None, receives: bool) -> list[Delivery]:
        """Gather the facts of all transfers of the window, then broadcast each transfer."""
        await self._finish(NUM_SLOTS - 1)
        facts = torch.zeros(max(map(facts_bytes, window)), dtype=torch.uint8)
        if filled is not None:
            own = filled.facts()
            facts[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        facts = facts.to(self._device)
        gathered = facts.new_empty(self._size, len(facts))
        with _interrupted(f"the window of {window[0]} could not be broadcast"):
            await asyncio.to_thread(self._group._allgather_base(gathered.view(-1), facts).wait)
            by_sender = gathered.cpu().numpy()
            deliveries = [delivery_from_facts(t, by_sender[t.sender].tobytes(), self._slot(t)) for t in window]
            self._sending.append(
                [
                    self._group.broadcast(delivery.payload, delivery.transfer.sender)
                    for delivery in deliveries
                    if delivery.num_bytes
                ]
            )
        if not receives:
            return []
        await self._finish(0)
        return deliveries

    def disconnect(self) -> None:
        """Leave the group, which ends it for all members."""
        self._connection_id = self._prepared = ""
        self._sending.clear()
        if self._group is not None:
            abort_group(self._group)
        self._group = self._store = None

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


@contextmanager
def _interrupted(failure: str) -> Iterator[None]:
    """Raises: SyncInterrupted with this text for an error of a process group."""
    try:
        yield
    except RuntimeError as error:
        raise SyncInterrupted(f"{failure}: {error}") from error
