"""The buckets of one sync put together to whole tensors, each proven before anybody sees it. Knows no model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import as_bytes, digest, digest_range
from meshrl.sync.manifest import Entry, Layout, Piece, SyncHeader
from meshrl.sync.order import Order, carries
from meshrl.sync.receive import Bucket, check_payload
from meshrl.sync.transport import BucketRef


class Arrival:
    """Takes the buckets of one sync, those of one stream in order. A tensor gets memory of its own when its first byte
    comes: who receives it may keep it after the bucket's memory has been filled anew, as loaders that wait for a whole
    layer do."""

    def __init__(self, layout: Layout, header: SyncHeader, name: str):
        self.layout, self.header, self.name = layout, header, name
        self.verify_s = self.copy_s = 0.0
        self._entries = {entry.name: entry for entry in layout.entries}
        self._order = Order(layout, name)
        self._open: dict[str, torch.Tensor] = {}  # begun, not complete
        self._missing = {entry.name: entry.num_bytes for entry in layout.entries}

    def take(self, bucket: Bucket) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Check a bucket's place, length and digests; yield the tensors that it completes. Raises: SyncError."""
        stream = self._order.stream_of(bucket.stream, bucket.index)
        pieces = list(stream.pieces(bucket.index))
        start, _ = stream.bucket_range(bucket.index)
        check_payload(self.name, bucket, stream, pieces, changes=False, with_pieces=self.header.digests is None)
        began = time.perf_counter()
        self._check(bucket, pieces, start)
        self.verify_s += time.perf_counter() - began
        for piece in pieces:
            began = time.perf_counter()
            name = piece.entry.name
            if name not in self._open:
                self._open[name] = _empty(self._entries[name])
            source = bucket.payload[piece.at : piece.at + piece.stop - piece.start]
            as_bytes(self._open[name])[piece.start : piece.stop].copy_(source)
            self._missing[name] -= source.numel()
            self.copy_s += time.perf_counter() - began
            if self._missing[name] == 0:
                yield self._entries[name], self._proven(name, self._open.pop(name))
        self._order.taken(bucket.stream)

    def finish(self) -> Iterator[tuple[Entry, torch.Tensor]]:
        """After the last bucket: yield the tensors without elements, which are in none. Raises: SyncError when there
        were fewer buckets."""
        self._order.check_complete()
        for entry in self.layout.entries:
            if entry.num_bytes == 0:
                yield entry, _empty(entry)

    def _check(self, bucket: Bucket, pieces: list[Piece], start: int) -> None:
        """The digest of the bucket, or those of its pieces, by which the sender of a shard vouches for them."""
        kind, payload = self.layout.digest, bucket.payload
        if bucket.pieces is None:
            runs = [(carries(pieces), bucket.digest, digest_range(kind, payload, start))]
        else:
            runs = [
                (
                    piece.entry.name,
                    said,
                    digest_range(kind, payload[piece.at :][: piece.stop - piece.start], piece.start),
                )
                for piece, said in zip(pieces, bucket.pieces, strict=True)
            ]
        for carried, said, arrived in runs:
            if arrived != said:
                raise SyncError(
                    f"{self.name}: bucket {bucket.index} was sent with digest {said:016x} and arrived with "
                    f"{arrived:016x}; it carries {carried}"
                )

    def _proven(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which has the digest of the trainer's own: gathered, cut and put together right."""
        if self.header.digests is None:
            return tensor  # its pieces had them
        began = time.perf_counter()
        value, wanted = digest(tensor), self.header.digests[name]
        self.verify_s += time.perf_counter() - began
        if value != wanted:
            others = [other for other, theirs in self.header.digests.items() if theirs == value]
            what = f"the values of {others[0]}" if others else f"digest {value:016x}, the trainer's is {wanted:016x}"
            raise SyncError(f"{self.name}: {name} arrived with {what}")
        return tensor


def layout_from(message: dict[str, Any]) -> Layout:
    """A layout that came as JSON of its fields."""
    entries = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in message["entries"])
    return Layout(**{**message, "entries": entries})


def header_to(header: SyncHeader) -> dict[str, Any]:
    """A header as JSON: digests as text, which no reader rounds."""
    digests = None if header.digests is None else {name: f"{value:016x}" for name, value in header.digests.items()}
    return {
        "version": header.version,
        "base_version": header.base_version,
        "mode": header.mode,
        "layout_hash": header.layout_hash,
        "digests": digests,
    }


def header_from(message: dict[str, Any]) -> SyncHeader:
    given = message["digests"]
    digests = None if given is None else {name: int(value, 16) for name, value in given.items()}
    return SyncHeader(**{**message, "digests": digests})


def ref_to(bucket: Bucket, slot: int) -> dict[str, Any]:
    """Where a bucket lies in its ring, and its digests, as JSON."""
    return {
        "index": bucket.index,
        "slot": slot,
        "num_bytes": bucket.payload.numel(),
        "digest": f"{bucket.digest:016x}",
        "stream": bucket.stream,
        "pieces": None if bucket.pieces is None else [f"{value:016x}" for value in bucket.pieces],
    }


def ref_from(message: dict[str, Any]) -> BucketRef:
    given = message["pieces"]
    pieces = None if given is None else tuple(int(value, 16) for value in given)
    return BucketRef(**{**message, "digest": int(message["digest"], 16), "pieces": pieces})


def _empty(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
