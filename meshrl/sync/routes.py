"""A receiver's end of whichever transport a sender's name tells."""

from __future__ import annotations

from typing import Protocol

import torch

from meshrl.sync.file_ring import SCHEME as FILES
from meshrl.sync.file_ring import FileRingView
from meshrl.sync.group_ring import SCHEME as GROUP
from meshrl.sync.group_ring import GroupView, Seat
from meshrl.sync.receive import Bucket
from meshrl.sync.remote_ring import RemoteRingView, ring_of
from meshrl.sync.transport import BucketRef, SharedRingView


class View(Protocol):
    """Where the buckets of one sender arrive."""

    name: str

    def bucket(self, ref: BucketRef) -> Bucket:
        """The bucket, its payload valid until the next one is asked for. Raises: SyncError."""
        ...

    def close(self) -> None: ...


def name_here(name: str, same_machine: bool) -> str:
    """What a receiver opens: on the sender's own machine its shared memory."""
    return ring_of(name) if same_machine and not name.startswith((FILES, GROUP)) else name


def open_view(name: str, num_slots: int, slot_bytes: int, seat: Seat, device: torch.device, timeout_s: float) -> View:
    """name: of `name_here`. seat, device, timeout_s: for a group. Raises: SyncError, FileNotFoundError."""
    if name.startswith(FILES):
        return FileRingView(name, slot_bytes)
    if name.startswith(GROUP):
        return GroupView(name, slot_bytes, seat, device, timeout_s)
    if name == ring_of(name):
        return SharedRingView(name, num_slots, slot_bytes)
    return RemoteRingView(name, slot_bytes)
