"""Buckets by broadcast: the sender and all its receivers form a process group of their own, over gloo or the
accelerator's own backend, so that the bytes leave the sender once however many receive them.

    sender:    ring = GroupRing(2, layout.staging_bytes, device, host, timeout_s); ring.gather("first", num_receivers)
    receiver:  view = GroupView(ring.name, slot_bytes, Seat(number, num_receivers), device, timeout_s)
               on ("receive", ref): await engine.receive(view.bucket(ref))

A group is of those who formed it: whoever comes in the place of a lost receiver needs a new one. An unfinished
broadcast ends with its group, when the first of its members closes it.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshrl.core.device import leave_group, lone_group
from meshrl.core.errors import SyncError
from meshrl.sync.receive import Bucket
from meshrl.sync.transport import BucketRef, ref_of

SCHEME = "group:"


class Seat(NamedTuple):
    """Which of how many receivers one is."""

    number: int
    num_receivers: int


class GroupRing:
    """The sender's end. slots: uint8[slot_bytes] each, on the device."""

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device, host: str, timeout_s: float):
        """host: where receivers reach this machine. timeout_s: of forming a group, and of one bucket."""
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(num_slots)]
        self._device, self._host, self._timeout = device, host, datetime.timedelta(seconds=timeout_s)
        self._meeting: _Meeting | None = None
        self._sent: list[dist.Work | None] = [None] * num_slots

    @property
    def name(self) -> str:
        """For receivers, after `gather`."""
        return f"{SCHEME}{self._host}:{self._meeting.port}" if self._meeting is not None else ""

    def gather(self, occasion: str, num_receivers: int) -> None:
        """Form the group, in the background, because its receivers hear of it only now. The same occasion keeps the one
        that there is: its members are the same, and none of them has left."""
        if self._meeting is not None and occasion == self._meeting.occasion:
            return
        self.close()
        self._meeting = _Meeting(occasion, num_receivers, self._device, self._host, self._timeout)

    def ref(self, bucket: Bucket) -> BucketRef:
        """Begin to send the bucket, and say so. Raises: SyncError when the group did not form, or has ended."""
        assert self._meeting is not None, "ref comes after gather"
        group, slot = self._meeting.group(), bucket.index % len(self.slots)
        before = self._sent[slot]
        try:
            if before is not None:
                before.wait()
            self._sent[slot] = group.broadcast(bucket.payload, 0) if bucket.payload.numel() else None
        except RuntimeError as error:
            raise SyncError(f"bucket {bucket.index} could not be sent to the group of receivers: {error}") from error
        return ref_of(bucket, slot)

    def close(self) -> None:
        """Leave the group, if there is one."""
        self._sent = [None] * len(self.slots)
        if self._meeting is not None:
            self._meeting.leave()
        self._meeting = None


class _Meeting:
    """One group, from the sender's side: the store where its members meet, and the thread that waits for them."""

    def __init__(self, occasion: str, num_receivers: int, device: torch.device, host: str, timeout: datetime.timedelta):
        self.occasion = occasion
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.port = self._store.port
        self._group: Any = None  # what `lone_group` gives
        self._failure: Exception | None = None

        def join() -> None:
            try:
                self._group = lone_group(self._store, 0, num_receivers + 1, device, timeout)
            except Exception as error:
                self._failure = error

        self._joining = threading.Thread(target=join, name="weights-group", daemon=True)
        self._joining.start()

    def group(self) -> Any:
        """Waits for: its members. Raises: SyncError when they don't come."""
        self._joining.join()
        if self._group is None:
            raise SyncError(f"the receivers of weights did not gather at port {self.port}: {self._failure}")
        return self._group

    def leave(self) -> None:
        """A thread that still waits ends at its timeout, and nobody hears of it."""
        if self._group is not None:
            leave_group(self._group)
        self._group = None


class GroupView:
    """A receiver's end: takes part in each broadcast that it is told of."""

    def __init__(self, name: str, slot_bytes: int, seat: Seat, device: torch.device, timeout_s: float):
        """Waits for: sender and all other receivers. Raises: SyncError when they don't come."""
        self.name = name
        host, _, port = name.removeprefix(SCHEME).rpartition(":")
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            self._store: Any = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
            self._group = lone_group(self._store, seat.number + 1, seat.num_receivers + 1, device, timeout)
        except RuntimeError as error:
            raise SyncError(f"the sender of weights can't be joined at {name}: {error}") from error
        self._payload = torch.empty(slot_bytes, dtype=torch.uint8, device=device)

    def bucket(self, ref: BucketRef) -> Bucket:
        """Receive the bucket; its payload is valid until the next is received. Raises: SyncError."""
        payload = self._payload[: ref.num_bytes]
        if ref.num_bytes:
            try:
                self._group.broadcast(payload, 0).wait()
            except RuntimeError as error:
                raise SyncError(f"bucket {ref.index} did not come from the sender of weights: {error}") from error
        return ref.at(payload)

    def close(self) -> None:
        """Leave the group, which ends it for all."""
        leave_group(self._group)
        self._group = self._store = None
