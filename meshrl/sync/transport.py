"""The protocol of transports, which carry the transfers of a sync between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Transfer

NUM_SLOTS = 2  # for each sender: one is filled while the other is read


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """How receivers reach a sender. ring: its shared memory, for receivers on the same machine."""

    host: str
    port: int
    token: str = ""
    ring: str = ""
    machine: int = 0


class Transport(Protocol):
    """One rank's end of all its connections. All ranks handle the layout's transfers in the same order, so they can't
    deadlock: a sender calls `buffer` and `put` for each of its own transfers, a receiver `get` and `release_slot` for
    each transfer of the others.

    Every wait ends when its task is cancelled; `disconnect` then ends the waits of other ranks.
    collective: whether a rank that only sends has to `get` the transfers of the others, too. num_bytes: memory of this
    rank's slots.
    """

    collective: bool = False
    num_bytes: int = 0

    def prepare(self, connection_id: str) -> Address | None:
        """The address of this rank for the receivers of the next sync; None = it does not send, or needs no address.
        connection_id: as in SyncOrder."""
        ...

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Connect to the other ranks of the sync. Arguments: as in SyncOrder. Raises: SyncError."""
        ...

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        """The slot for a transfer of this rank, as soon as its previous content may be replaced. Raises: SyncError."""
        ...

    async def put(self, delivery: Delivery) -> Delivery:
        """Begin to send a transfer, which is in its slot. Returns it with the slot's address, if other processes can
        open the slot. Raises: SyncError."""
        ...

    async def get(self, transfer: Transfer) -> Delivery:
        """Wait for a transfer of another rank; valid until `release_slot`. Raises: SyncError."""
        ...

    async def release_slot(self, delivery: Delivery) -> None:
        """Let its sender know that this rank has read a transfer."""
        return

    def disconnect(self) -> None:
        """Close all connections, which ends all waits at their other ends."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
