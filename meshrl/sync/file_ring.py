"""Buckets as files in a folder that sender and receivers both see: for machines that share a disk and no network route.

Each bucket is a file of its own, written and closed before anybody hears of it and never written again, which is what
network file systems promise to show everywhere. Of one sender there are as many files at a time as slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from meshrl.core.errors import SyncError
from meshrl.process.leases import LeasedFolder, sweep
from meshrl.sync.receive import Bucket
from meshrl.sync.transport import BucketRef, ref_of

SCHEME = "file:"


class FileRing:
    """The sender's end. slots: uint8[slot_bytes] each, which buckets are cut into; `ref` writes one out."""

    def __init__(self, num_slots: int, slot_bytes: int, folder: Path):
        """Raises: SyncError when the folder can't be written to."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder)  # of senders of this machine that were killed
            self._owned = LeasedFolder(folder)
            self._owned.path.chmod(0o755)  # receivers may run as another user
        except OSError as error:
            raise SyncError(f"rollout.sync_folder can't be written to: {error}; name one that all ranks see") from error
        self._folder = self._owned.path
        self.name = f"{SCHEME}{self._folder}"
        self.slots: Sequence[torch.Tensor] = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self._num_written = 0

    def ref(self, bucket: Bucket) -> BucketRef:
        """Write the bucket and say which file it is in. Raises: SyncError."""
        number, self._num_written = self._num_written, self._num_written + 1
        try:
            with (self._folder / str(number)).open("xb") as file:
                file.write(bucket.payload.numpy().data)
            (self._folder / str(number - len(self.slots))).unlink(missing_ok=True)
        except OSError as error:
            raise SyncError(f"bucket {bucket.index} could not be written into rollout.sync_folder: {error}") from error
        return ref_of(bucket, number)

    def close(self) -> None:
        """Remove all that was written."""
        self._owned.close()


class FileRingView:
    """A receiver's end."""

    def __init__(self, name: str, slot_bytes: int):
        self.name, self._folder = name, Path(name.removeprefix(SCHEME))
        self._payload = torch.empty(slot_bytes, dtype=torch.uint8)

    def bucket(self, ref: BucketRef) -> Bucket:
        """Read the bucket; its payload is valid until the next is read. Raises: SyncError."""
        payload = self._payload[: ref.num_bytes]
        try:
            with (self._folder / str(ref.slot)).open("rb") as file:
                num_read = file.readinto(payload.numpy().data)
        except OSError as error:
            raise SyncError(f"bucket {ref.index} could not be read from rollout.sync_folder: {error}") from error
        if num_read != ref.num_bytes:
            where = self._folder / str(ref.slot)
            raise SyncError(f"bucket {ref.index} has {ref.num_bytes} bytes, and {where} only {num_read}")
        return ref.at(payload)

    def close(self) -> None:
        pass
