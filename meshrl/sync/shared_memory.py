"""Slots of memory for the processes of one machine, which all read the same bytes; nothing is pickled. In host memory,
or in the memory of a device that they share.

This file maps segments itself instead of using multiprocessing.shared_memory.SharedMemory, for three reasons: up to
Python 3.12 attaching registers the segment with the attaching process's resource tracker, which unlinks the segment
when that process ends; SharedMemory.close() fails while a tensor still uses the memory; and a segment that is too large
for /dev/shm causes a bus error in the middle of a write.
"""

from __future__ import annotations

import _posixshmem
import mmap
import os
import shutil
from pathlib import Path

import torch

from meshrl.core.device import export_memory, import_memory
from meshrl.core.errors import SyncError
from meshrl.process.leases import new_name, take_lease
from meshrl.sync.delivery import SlotAddress

_FOLDER = Path("/dev/shm")  # of the segments, on Linux


class SharedRingView:
    """A receiver's end: maps the sender's segment of num_slots buffers, never unlinks it.

    slots: uint8[slot_bytes] each; their memory is unmapped with the last tensor that uses it.
    """

    def __init__(self, name: str, num_slots: int, slot_bytes: int):
        """Raises: FileNotFoundError when the sender has closed the ring."""
        self.name, self.num_slots, self.slot_bytes = name, num_slots, slot_bytes
        fd = _posixshmem.shm_open(_path(name), os.O_RDWR, mode=0o600)
        try:
            self.slots = _map(fd, num_slots, slot_bytes, reserve=False)
        finally:
            os.close(fd)

    def slot_address(self, slot: int) -> SlotAddress:
        """The address of a slot for other processes of this machine."""
        return SlotAddress(ring=self.name, num_slots=self.num_slots, slot_bytes=self.slot_bytes, slot=slot)

    def close(self) -> None:
        """Release the segment."""
        self.slots = []


class SharedRing(SharedRingView):
    """The sender's end: creates the segment, and `close` unlinks it.

    Extra memory of a sync: num_slots * slot_bytes, once for all receivers.
    If this process is killed, a sweep (process/leases.py) removes the segment.
    """

    def __init__(self, num_slots: int, slot_bytes: int):
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.name, fd = _new_segment()
        self._linked = True
        try:
            self.slots = _map(fd, num_slots, slot_bytes, reserve=True)
        except OSError as error:
            self.close()
            raise SyncError(_shortage(num_slots, slot_bytes, error)) from error
        finally:
            os.close(fd)  # the mapping has its own copy, which keeps the segment and its lease

    def close(self) -> None:
        """Unlink the segment; safe to call twice."""
        if self._linked:
            self._linked = False
            _posixshmem.shm_unlink(_path(self.name))  # while it is mapped: the lease ends with the last mapping
        super().close()


class DeviceMemory:
    """One slot in the memory of this process's accelerator. handles: what the processes on the devices of several ranks
    need, the first for this device, the next ones for the devices after it."""

    def __init__(self, memory: torch.Tensor):
        self.name, self.slots = new_name(), [memory]
        self.handle = export_memory(memory)
        self.handles: tuple[str, ...] = ()

    def slot_address(self, slot: int) -> SlotAddress:
        """The address of the slot for other processes."""
        size = self.slots[slot].numel()
        return SlotAddress(ring=self.name, num_slots=1, slot_bytes=size, slot=slot, handles=self.handles)

    def close(self) -> None:
        """Release the memory."""
        self.slots = []


def open_slots(address: SlotAddress, device: torch.device, number: int) -> list[torch.Tensor]:
    """The slots of another process's memory. device, number: of this process among those of its server."""
    if address.handles:
        return [import_memory(address.handles[number], device)]
    return SharedRingView(address.ring, address.num_slots, address.slot_bytes).slots


def _path(name: str) -> str:
    return f"/{name}"


def _shortage(num_slots: int, slot_bytes: int, error: OSError) -> str:
    room = ""
    if _FOLDER.is_dir():
        disk = shutil.disk_usage(_FOLDER)
        room = f"{_FOLDER} has {disk.total:,} bytes, {disk.free:,} of them free. "
    return (
        f"{num_slots * slot_bytes:,} bytes of shared memory for weight syncs could not be reserved: {error}. {room}"
        "All train ranks of a machine together need at most 2 x rollout.sync_bucket_bytes there. Lower that key, or "
        f"make {_FOLDER} larger (Docker gives 64 MB: --shm-size=1g; Kubernetes: an emptyDir with medium Memory)"
    )


def _new_segment() -> tuple[str, int]:
    """(name, descriptor) of an empty segment; the descriptor holds this process's lease on it."""
    while True:
        name = new_name()
        fd = _posixshmem.shm_open(_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        if take_lease(fd):
            return name, fd
        os.close(fd)


def _map(fd: int, num_slots: int, slot_bytes: int, reserve: bool) -> list[torch.Tensor]:
    """The slots as tensors. Each keeps the mapping alive, so no tensor outlives its memory."""
    stride = -(-slot_bytes // 64) * 64  # slots are aligned to cache lines, and to words for the digest
    size = max(1, num_slots * stride)
    if reserve and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)  # reserves the pages now: a full /dev/shm would be a bus error later
    elif reserve:
        os.ftruncate(fd, size)
    segment = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    return [segment[slot * stride : slot * stride + slot_bytes] for slot in range(num_slots)]
