"""Transfers by broadcast: each sender and its receivers are a process group, over gloo or the accelerator's own
backend. A sender sends its bytes once, whatever the number of receivers.

Train ranks that also sample already have a group. Samplers in their own ranks form a group with each sender. A group
can't be joined later, so a rank that replaces a failed one needs new groups. An unfinished broadcast ends with its
group.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshrl.core.device import abort_group, separate_group
from meshrl.core.errors import SyncInterrupted
from meshrl.sync.delivery import NUM_HEAD, Delivery, SlotAddress, delivery_from_facts
from meshrl.sync.layout import Layout, Transfer
from meshrl.sync.transport import NUM_SLOTS, Address


class Broadcast:
    """One rank's end."""

    def __init__(
        self,
        layout: Layout,
        sender: int | None,
        host: str,
        device: torch.device,
        timeout_s: float,
        shared: Any = None,
    ):
        """sender: this rank's number among the senders; None = it only receives. host: the address under which other
        ranks reach this machine. timeout_s: for forming a group, and for one broadcast. shared: the existing process
        group of ranks that send and receive, in which rank s is sender s; None = form groups."""
        self._sender, self._host, self._device, self._shared = sender, host, device, shared
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._connection_id = self._prepared = ""
        self._store: dist.TCPStore | None = None
        self._groups: dict[int, Any] = {}  # by sender
        self._most_parts = max((len(transfer.parts) for transfer in layout.transfers), default=0)

        self._slot_bytes = layout.slot_bytes
        self._slots = [self._empty() for _ in range(NUM_SLOTS)] if sender is not None else []
        self._sending: list[list[Any]] = [[] for _ in range(NUM_SLOTS)]
        self._received: torch.Tensor | None = None

    @property
    def collective(self) -> bool:
        """Whether every rank of the group takes part in every transfer."""
        return self._shared is not None

    @property
    def num_bytes(self) -> int:
        """Memory of the slots."""
        return sum(slot.numel() for slot in self._slots)

    def prepare(self, connection_id: str) -> Address | None:
        """The address at which receivers form a group with this rank."""
        if self._shared is not None or self._sender is None:
            return None
        if self._store is None or connection_id != self._prepared:
            self.disconnect()
            self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
            self._prepared = connection_id
        return Address(host=self._host, port=self._store.port)

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Form the groups; with an unchanged connection_id, keep them. Waits for: their members.

        Raises: SyncError.
        """
        if self._shared is not None or connection_id == self._connection_id:
            return
        joins = {sender: self._join(sender, address, number, num_receivers) for sender, address in senders.items()}
        if self._sender is not None and num_receivers:
            joins[self._sender] = self._form(num_receivers)
        groups = await asyncio.gather(*joins.values())
        self._groups = dict(zip(joins, groups, strict=True))
        self._connection_id = connection_id

    async def _form(self, num_receivers: int) -> Any:
        assert self._store is not None, "call prepare before connect"
        try:
            return await asyncio.to_thread(
                separate_group, self._store, 0, num_receivers + 1, self._device, self._timeout
            )
        except RuntimeError as error:
            raise SyncInterrupted(
                f"the receivers of weights did not join the group of their sender: {error}"
            ) from error

    async def _join(self, sender: int, address: Address, number: int, num_receivers: int) -> Any:
        def join() -> Any:
            store = dist.TCPStore(address.host, address.port, is_master=False, timeout=self._timeout)
            return separate_group(store, number + 1, num_receivers + 1, self._device, self._timeout)

        try:
            return await asyncio.to_thread(join)
        except RuntimeError as error:
            where = f"{address.host}:{address.port}"
            raise SyncInterrupted(f"the group of sender {sender} at {where} can't be joined: {error}") from error

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        """The slot for a transfer of this rank, as soon as its previous content is sent. Raises: SyncError."""
        slot = transfer.index % NUM_SLOTS
        await self._wait(transfer, self._sending[slot])
        self._sending[slot] = []
        return self._slots[slot]

    async def put(self, delivery: Delivery) -> None:
        """Begin to send a transfer. Raises: SyncError."""
        payload, transfer = delivery.payload, delivery.transfer
        assert payload is not None
        if self._shared is None and transfer.sender not in self._groups:
            return  # this rank is its only receiver
        facts = self._facts()
        raw = torch.frombuffer(bytearray(delivery.facts()), dtype=torch.uint8)
        facts[0] = len(raw)
        facts.view(torch.uint8)[8 : 8 + len(raw)].copy_(raw)
        self._sending[transfer.index % NUM_SLOTS] = [
            self._begin(transfer, tensor) for tensor in (facts, payload) if tensor.numel()
        ]

    async def get(self, transfer: Transfer) -> Delivery:
        """Wait for a transfer of another rank; valid until the next one. Raises: SyncError."""
        facts = self._facts()
        await self._wait(transfer, [self._begin(transfer, facts)])
        if self._received is None:
            self._received = self._empty()
        host = facts.cpu()
        length = int(host[0])
        raw = host.view(torch.uint8)[8 : 8 + length].numpy().tobytes()
        delivery = delivery_from_facts(transfer, raw, self._received)
        if delivery.payload is not None and delivery.payload.numel():
            await self._wait(transfer, [self._begin(transfer, delivery.payload)])
        return delivery

    async def release_slot(self, delivery: Delivery) -> None:
        """Nothing to do: when a broadcast ends, the sender may reuse its slot."""

    def slot_address(self, transfer: Transfer) -> SlotAddress | None:
        """None: the slots are not in shared memory."""
        return None

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

    def _facts(self) -> torch.Tensor:
        """A tensor for the facts of any transfer, with their length in front."""
        return torch.zeros(1 + NUM_HEAD + 2 * self._most_parts, dtype=torch.int64, device=self._device)

    def _begin(self, transfer: Transfer, tensor: torch.Tensor) -> Any:
        try:
            if self._shared is not None:
                return self._shared.broadcast(tensor, transfer.sender)
            return self._groups[transfer.sender].broadcast(tensor, 0)
        except RuntimeError as error:
            raise SyncInterrupted(f"{transfer} could not be broadcast: {error}") from error

    async def _wait(self, transfer: Transfer, works: list[Any]) -> None:
        try:
            for work in works:
                await asyncio.to_thread(work.wait)
        except RuntimeError as error:
            raise SyncInterrupted(f"{transfer} could not be broadcast: {error}") from error
