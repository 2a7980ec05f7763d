"""Transfers by broadcast: each sender and its receivers are a process group, over gloo or the accelerator's own
backend. A sender sends its bytes once, whatever the number of receivers.

Samplers in their own ranks form a group with each sender. A group can't be joined later, so a rank that replaces a
failed one needs new groups. An unfinished broadcast ends with its group.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from meshrl.core.device import abort_group, separate_group
from meshrl.core.errors import SyncInterrupted
from meshrl.parallel.store import listening_store
from meshrl.sync.delivery import NUM_SLOTS, Address, Delivery, TransferByTransfer, delivery_from_facts, facts_bytes
from meshrl.sync.layout import Layout, Transfer


class Broadcast(TransferByTransfer):
    """One rank's end."""

    def __init__(
        self,
        layout: Layout,
        sender: int | None,
        host: str,
        device: torch.device,
        timeout_s: float,
    ):
        """sender: this rank's number among the senders; None = it only receives. host: the address under which other
        ranks reach this machine. timeout_s: for forming a group, and for one broadcast."""
        self._sender, self._host, self._device = sender, host, device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._connection_id = self._prepared = ""
        self._store: dist.TCPStore | None = None
        self._groups: dict[int, Any] = {}  # by sender
        self._slot_bytes = layout.slot_bytes
        self._slots = [self._empty() for _ in range(NUM_SLOTS)] if sender is not None else []
        self._sending: list[list[Any]] = [[] for _ in range(NUM_SLOTS)]
        self._received: dict[int, torch.Tensor] = {}  # by sender
        self.num_bytes = len(self._slots) * layout.slot_bytes

    def prepare(self, connection_id: str) -> Address | None:
        """The address at which receivers form a group with this rank."""
        if self._sender is None:
            return None
        if self._store is None or connection_id != self._prepared:
            self.disconnect()
            self._store = listening_store(self._host, self._timeout)
            self._prepared = connection_id
        return Address(host=self._host, port=self._store.port)

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Form the groups; with an unchanged connection_id, keep them. Waits for: their members.

        Raises: SyncError.
        """
        if connection_id == self._connection_id:
            return

        def join(sender: int, rank: int, at: Address) -> Any:
            with _interrupted(f"the group of sender {sender} at {at.host}:{at.port} and its receivers can't be formed"):
                store = dist.TCPStore(at.host, at.port, is_master=False, timeout=self._timeout)
                return separate_group(store, rank, num_receivers + 1, self._device, self._timeout)

        members = [(sender, number + 1, at) for sender, at in senders.items()]
        own_address = self.prepare(connection_id)
        if self._sender is not None and own_address is not None and num_receivers:
            members.append((self._sender, 0, own_address))
        groups = await asyncio.gather(*(asyncio.to_thread(join, *member) for member in members))
        self._groups = {sender: group for (sender, _, _), group in zip(members, groups, strict=True)}
        self._connection_id = connection_id

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        slot = transfer.index % NUM_SLOTS
        await self._wait(transfer, self._sending[slot])
        self._sending[slot] = []
        return self._slots[slot]

    async def put(self, delivery: Delivery) -> Delivery:
        payload, transfer = delivery.payload, delivery.transfer
        assert payload is not None
        if transfer.sender in self._groups:  # else this rank is its only receiver
            facts = torch.frombuffer(bytearray(delivery.facts()), dtype=torch.uint8).to(self._device)
            works = [self._begin(transfer, tensor) for tensor in (facts, payload) if tensor.numel()]
            self._sending[transfer.index % NUM_SLOTS] = works
        return delivery

    async def get(self, transfer: Transfer) -> Delivery:
        facts = torch.empty(facts_bytes(transfer), dtype=torch.uint8, device=self._device)
        await self._wait(transfer, [self._begin(transfer, facts)])
        if transfer.sender not in self._received:
            self._received[transfer.sender] = self._empty()
        slot = self._received[transfer.sender]
        delivery = delivery_from_facts(transfer, facts.cpu().numpy().tobytes(), slot)
        if delivery.num_bytes:
            await self._wait(transfer, [self._begin(transfer, slot[: delivery.num_bytes])])
        return delivery

    def disconnect(self) -> None:
        """Leave the groups, which ends them for all members."""
        self._connection_id = self._prepared = ""
        self._sending = [[] for _ in range(NUM_SLOTS)]
        for group in self._groups.values():
            abort_group(group)
        self._groups, self._store = {}, None

    def close(self) -> None:
        self.disconnect()
        self._slots = []

    def _empty(self) -> torch.Tensor:
        return torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)

    def _begin(self, transfer: Transfer, tensor: torch.Tensor) -> Any:
        with _interrupted(f"{transfer} could not be broadcast"):
            return self._groups[transfer.sender].broadcast(tensor, 0)

    async def _wait(self, transfer: Transfer, works: list[Any]) -> None:
        with _interrupted(f"{transfer} could not be broadcast"):
            for work in works:
                await asyncio.to_thread(work.wait)


@contextmanager
def _interrupted(failure: str) -> Iterator[None]:
    """Raises: SyncInterrupted with this text for an error of a process group."""
    try:
        yield
    except RuntimeError as error:
        raise SyncInterrupted(f"{failure}: {error}") from error
