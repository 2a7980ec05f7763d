"""What carries the transfers of a sync between ranks: put and get, whatever is below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from meshrl.sync.delivery import Delivery, Place
from meshrl.sync.layout import Transfer

NUM_SLOTS = 2  # of each sender: one is filled while the other is read


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where receivers find a sender. ring: its shared memory, for receivers of the same machine."""

    host: str
    port: int
    token: str = ""
    ring: str = ""
    machine: int = 0


class Transport(Protocol):
    """One rank's end. All ranks walk the layout's transfers in one order, so nothing waits in a circle: a sender calls
    `buffer` and `put` for each of its own, a receiver `get` and `taken` for each of the others'.

    Every wait ends when its task is cancelled; `disconnect` then ends what waits at other ranks.
    """

    @property
    def collective(self) -> bool:
        """Whether a rank that only sends has to `get` the transfers of the others, too."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's slots."""
        ...

    def prepare(self, occasion: str) -> Address | None:
        """Where receivers find this rank in the next sync; None = it does not send, or needs no address. occasion:
        another text where ranks have come or gone since the last sync, or that one was cancelled."""
        ...

    async def connect(self, occasion: str, senders: Mapping[int, Address], number: int, num_receivers: int) -> None:
        """Be ready for the sync. senders: those that this rank receives from. number: which of the receivers it is.
        num_receivers: of what this rank sends, without itself; for a rank that only receives: of what its senders send.
        Raises: SyncError."""
        ...

    async def buffer(self, transfer: Transfer) -> torch.Tensor: ...

    async def put(self, delivery: Delivery) -> None: ...

    async def get(self, transfer: Transfer) -> Delivery: ...

    async def taken(self, delivery: Delivery) -> None: ...

    def place(self, transfer: Transfer) -> Place | None: ...

    def disconnect(self) -> None: ...

    def close(self) -> None: ...
