"""How buckets travel between processes of one machine: through shared memory, described by a few numbers.

Inside one process nothing is needed: `send_weights` awaits `receiver.receive(bucket)` itself. Between processes the
sender cuts the stream straight into the slots of a SharedRing (`iter_buckets(..., staging=ring.slots)`), and a
RingReceiver tells the other side where to look. The answer to that message is what frees the slot. No weight is
pickled, and all receivers read the same segment.

    sender:    ring = SharedRing(2, layout.staging_bytes)
               receivers = [RingReceiver(ring, call) for call in channels]      # call: an RPC to the other process
               await send_weights(header, iter_buckets(layout, tensors, staging=ring.slots), receivers)
    receiver:  view = SharedRingView(name, num_slots, slot_bytes)
               on ("receive", ref): await engine.receive(view.bucket(ref))

A segment is mapped by hand rather than with multiprocessing.shared_memory.SharedMemory, for three reasons: up to
Python 3.12 attaching registers the segment with the attaching process's resource tracker, which unlinks it under the
owner's feet when that process ends; SharedMemory.close() fails while a tensor still looks at the memory; and a
segment larger than /dev/shm is only noticed as a bus error in the middle of a write.
"""

from __future__ import annotations

import _posixshmem
import mmap
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Self

import numpy as np
import torch

from meshrl.core.errors import SyncError
from meshrl.process.leases import new_name, take_lease
from meshrl.sync.manifest import Ack, Layout, SyncHeader
from meshrl.sync.receive import Bucket, Place

Channel = Callable[[str, Any], Awaitable[Any]]
"""`await call(method, argument)` runs that WeightReceiver method in the other process and returns or raises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRef:
    """A bucket whose payload is num_bytes in a slot of a ring: all that crosses the pipe. The rest: as in Bucket."""

    index: int
    slot: int
    num_bytes: int
    digest: int
    stream: int = 0
    pieces: tuple[int, ...] | None = None
    changes: tuple[int, ...] | None = None

    def at(self, payload: torch.Tensor, place: Place | None = None) -> Bucket:
        """The bucket again, over its payload."""
        return Bucket(
            index=self.index,
            payload=payload[: self.num_bytes],
            digest=self.digest,
            stream=self.stream,
            pieces=self.pieces,
            changes=self.changes,
            place=place,
        )


def ref_of(bucket: Bucket, slot: int) -> BucketRef:
    """What to say of a bucket that lies there."""
    return BucketRef(
        index=bucket.index,
        slot=slot,
        num_bytes=bucket.payload.numel(),
        digest=bucket.digest,
        stream=bucket.stream,
        pieces=bucket.pieces,
        changes=bucket.changes,
    )


class SharedRing:
    """The sender's end: owns a segment of num_slots buffers and unlinks it. A context manager.

    slots: uint8[slot_bytes] each. Extra memory of a sync: num_slots * slot_bytes, once for all receivers.
    After a SIGKILL of this process its resource tracker unlinks the segment; after one of both, the next run's sweep.
    Raises: SyncError when the machine's shared memory is too small.
    """

    def __init__(self, num_slots: int, slot_bytes: int):
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.slots: list[torch.Tensor] = []
        self.name, fd = _new_segment()
        self._linked = True
        resource_tracker.register(_path(self.name), "shared_memory")
        try:
            self.slots = _map(fd, num_slots, slot_bytes, reserve=True)
        except OSError as error:
            self.close()
            raise SyncError(
                f"{num_slots} slots of {slot_bytes} bytes of shared memory could not be had ({error}); make "
                "rollout.sync_bucket_bytes smaller, or /dev/shm larger (a container: --shm-size)"
            ) from error
        finally:
            os.close(fd)  # the mapping has a copy, which holds the segment for as long as there are slots

    def ref(self, bucket: Bucket) -> BucketRef:
        """Describe a bucket that lies in its slot. Raises: SyncError when its payload is elsewhere."""
        slot = bucket.index % self.num_slots
        if bucket.payload.numel() and bucket.payload.data_ptr() != self.slots[slot].data_ptr():  # nothing is nowhere
            raise SyncError(
                f"bucket {bucket.index} does not lie in slot {slot} of ring {self.name}; cut the stream with "
                "iter_buckets(..., staging=ring.slots)"
            )
        return ref_of(bucket, slot)

    def close(self) -> None:
        """Unlink the segment; safe to call twice. The memory goes when the last tensor that looks at it does."""
        self.slots = []
        if self._linked:
            self._linked = False
            _posixshmem.shm_unlink(_path(self.name))
            resource_tracker.unregister(_path(self.name), "shared_memory")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SharedRingView:
    """A receiver's end: looks at the sender's segment, never unlinks it."""

    def __init__(self, name: str, num_slots: int, slot_bytes: int):
        """Raises: FileNotFoundError when the sender has closed the ring."""
        self.name, self.num_slots, self.slot_bytes = name, num_slots, slot_bytes
        fd = _posixshmem.shm_open(_path(name), os.O_RDWR, mode=0o600)
        try:
            self._slots = _map(fd, num_slots, slot_bytes, reserve=False)
        finally:
            os.close(fd)

    def slot(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes]: the memory of a slot."""
        return self._slots[index]

    def bucket(self, ref: BucketRef) -> Bucket:
        """The bucket, its payload a view of the slot: valid until the sender hears that it was received."""
        place = Place(ring=self.name, num_slots=self.num_slots, slot_bytes=self.slot_bytes, slot=ref.slot)
        return ref.at(self._slots[ref.slot], place)

    def close(self) -> None:
        """Let go of the segment; the memory is unmapped when no payload looks at it any more."""
        self._slots = []


class RingReceiver:
    """The sender's stand-in for a WeightReceiver in another process of this machine."""

    def __init__(self, ring: SharedRing, call: Channel):
        self._ring, self._call = ring, call

    async def reconcile(self, layout: Layout) -> None:
        await self._call("reconcile", layout)

    async def begin(self, header: SyncHeader) -> None:
        await self._call("begin", header)

    async def receive(self, bucket: Bucket) -> None:
        await self._call("receive", self._ring.ref(bucket))

    async def commit(self) -> Ack:
        ack: Ack = await self._call("commit", None)
        return ack

    async def cancel(self) -> None:
        await self._call("cancel", None)


def _path(name: str) -> str:
    return f"/{name}"


def _new_segment() -> tuple[str, int]:
    """(name, descriptor) of an empty one, held by this process."""
    while True:
        name = new_name()
        fd = _posixshmem.shm_open(_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        if take_lease(fd):
            return name, fd
        os.close(fd)


def _map(fd: int, num_slots: int, slot_bytes: int, reserve: bool) -> list[torch.Tensor]:
    """The slots as tensors. Each keeps the mapping alive through its array, so none can outlive its memory."""
    stride = -(-slot_bytes // 64) * 64  # a slot starts on a cache line, and on a word for the digest
    size = max(1, num_slots * stride)
    if reserve and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)  # takes the pages now: a full /dev/shm is an error here, a bus error later
    elif reserve:
        os.ftruncate(fd, size)
    whole = torch.from_numpy(np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8))
    return [whole[slot * stride : slot * stride + slot_bytes] for slot in range(num_slots)]
