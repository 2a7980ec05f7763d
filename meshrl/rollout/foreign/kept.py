"""The buckets of the version in place, whole, in shared memory: what changes are written into for a server whose loader
takes whole tensors. A delta then crosses the network, and everything only this machine's memory.

Memory: one copy of the weights in the sampler's dtype, of the host, for each replica.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import digest_range
from meshrl.sync.manifest import Layout
from meshrl.sync.order import carries
from meshrl.sync.receive import WHOLE, Bucket, Place, check_payload, sections, write_changes
from meshrl.sync.transport import SharedRing


class Kept:
    """One slot for each bucket of each stream."""

    def __init__(self, layout: Layout, name: str):
        """name: of the receiver, in errors. Raises: SyncError when the machine's shared memory is too small."""
        self._layout, self._name = layout, name
        self._first = [0, *accumulate(stream.num_buckets for stream in layout.streams)]
        try:
            self._ring = SharedRing(layout.num_buckets, layout.staging_bytes)
        except SyncError as error:
            raise SyncError(
                f"{name}: rollout.sync_mode delta keeps the weights, {layout.total_bytes} bytes, in shared memory, "
                "which has no room for them; make /dev/shm larger (a container: --shm-size), or send everything (full)"
            ) from error

    def whole(self, bucket: Bucket) -> Bucket:
        """Write a bucket, or its changes, into its slot; the same bucket as if it had come whole. That it is what the
        trainer has, its pieces' digests are to prove. Raises: SyncError for one that is not as it was sent."""
        streams = self._layout.streams
        if not 0 <= bucket.stream < len(streams) or not 0 <= bucket.index < streams[bucket.stream].num_buckets:
            return bucket  # whoever takes it says what is wrong with it
        stream, number = streams[bucket.stream], self._first[bucket.stream] + bucket.index
        start, stop = stream.bucket_range(bucket.index)
        payload = self._ring.slots[number][: stop - start]
        if bucket.changes is None:
            if bucket.payload.shape != payload.shape:
                return bucket
            payload.copy_(bucket.payload)
        else:
            self._change(bucket, payload)
        ring = self._ring
        place = Place(ring=ring.name, num_slots=ring.num_slots, slot_bytes=ring.slot_bytes, slot=number)
        return replace(bucket, payload=payload, changes=None, place=place)

    def _change(self, bucket: Bucket, payload: torch.Tensor) -> None:
        pieces = list(self._layout.streams[bucket.stream].pieces(bucket.index))
        check_payload(self._name, bucket, self._layout.streams[bucket.stream], pieces, changes=True, with_pieces=True)
        arrived = digest_range(self._layout.digest, bucket.payload)
        if arrived != bucket.digest:
            raise SyncError(
                f"{self._name}: bucket {bucket.index} was sent with digest {bucket.digest:016x} and arrived with "
                f"{arrived:016x}; it carries {carries(pieces)}"
            )
        for piece, count, section in sections(bucket, pieces):
            raw = payload[piece.at : piece.at + piece.stop - piece.start]
            if count == WHOLE:
                raw.copy_(section)
            else:
                write_changes(piece, section, count, raw)

    def close(self) -> None:
        self._ring.close()
