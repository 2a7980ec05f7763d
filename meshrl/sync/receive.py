from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from meshrl.sync.manifest import Ack, Layout, SyncHeader


@dataclass(kw_only=True, slots=True)
class Bucket:
    """One piece of the stream: bytes [index * bucket_bytes, ...). payload: uint8 tensor; digest: of these bytes."""

    index: int
    payload: Any
    digest: int


class WeightReceiver(Protocol):
    """The receiving half of a sync: idle -> begin -> receive* -> commit | cancel."""

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the engine's own parameters, both ways. Raises UnloadedParamsError."""
        ...

    async def begin(self, header: SyncHeader) -> None: ...

    async def receive(self, bucket: Bucket) -> None: ...

    async def commit(self) -> Ack: ...

    async def cancel(self) -> None: ...
