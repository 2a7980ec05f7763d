"""Transfers by broadcast: each sender and its receivers are a process group, over gloo or the accelerator's own
backend. A sender sends its bytes once, whatever the number of receivers.

Train ranks that also sample already have a group. Samplers in their own ranks form a group with each sender. A group
can't be joined later, so a rank that replaces a failed one needs new groups. An unfinished broadcast ends with its
group.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshrl.core.device import abort_group, separate_group
from meshrl.core.errors import SyncInterrupted
from meshrl.sync.delivery import NUM_HEAD, Delivery, delivery_from_facts
from meshrl.sync.layout import Layout, Transfer
from meshrl.sync.transport import NUM_SLOTS, Address, Transport


class Broadcast(Transport):
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
        self.collective = shared is not None
        self.num_bytes = len(self._slots) * layout.slot_bytes

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

        async def join(rank: int, find_store: Callable[[], Any], failure: str) -> Any:
            def form() -> Any:
                return separate_group(find_store(), rank, num_receivers + 1, self._device, self._timeout)

            with _interrupted(failure):
                return await asyncio.to_thread(form)

        joins = {}
        for sender, at in senders.items():
            store = partial(dist.TCPStore, at.host, at.port, is_master=False, timeout=self._timeout)
            joins[sender] = join(
                number + 1, store, f"the group of sender {sender} at {at.host}:{at.port} can't be joined"
            )
        if self._sender is not None and num_receivers:
            assert self._store is not None, "call prepare before connect"
            failure = "the receivers of weights did not join the group of their sender"
            joins[self._sender] = join(0, lambda: self._store, failure)
        groups = await asyncio.gather(*joins.values())
        self._groups = dict(zip(joins, groups, strict=True))
        self._connection_id = connection_id

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        slot = transfer.index % NUM_SLOTS
        await self._wait(transfer, self._sending[slot])
        self._sending[slot] = []
        return self._slots[slot]

    async def put(self, delivery: Delivery) -> None:
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
        with _interrupted(transfer, "could not be broadcast"):
            if self._shared is not None:
                return self._shared.broadcast(tensor, transfer.sender)
            return self._groups[transfer.sender].broadcast(tensor, 0)

    async def _wait(self, transfer: Transfer, works: list[Any]) -> None:
        with _interrupted(transfer, "could not be broadcast"):
            for work in works:
                await asyncio.to_thread(work.wait)


@contextmanager
def _interrupted(*failure: object) -> Iterator[None]:
    """Raises: SyncInterrupted with these words for an error of a process group."""
    try:
        yield
    except RuntimeError as error:
        raise SyncInterrupted(f"{' '.join(map(str, failure))}: {error}") from error
