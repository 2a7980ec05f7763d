"""What is sent (Layout, once a run), and what each sync says of it (SyncHeader, Ack). Names, slices and bytes only.

`sync` knows no model and no engine: the train engine yields (wire name, tensor), every engine consumes the same.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from meshrl.sync.digest import DigestKind

SyncMode = Literal["full", "delta", "adapter"]
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
ALIGNMENT_BYTES = 16  # of each tensor's first byte in the stream; the gaps are zero and have no meaning


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of the layout, in the sampler's dtype, or the part of it that one stream carries. offset: byte offset
    of its first byte in the stream of all buckets laid end to end; a tensor longer than the bucket cap spans several
    buckets. shape: of the whole tensor. first: byte of the tensor at which the part begins, num_bytes long.

    Example: Entry(name="model.norm.weight", shape=(64,), dtype="bfloat16", num_bytes=128, offset=4096)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    offset: int
    first: int = 0


class Piece(NamedTuple):
    """What one bucket holds of one tensor: bytes [start, stop) of the tensor, from byte `at` of the bucket on."""

    entry: Entry
    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one sender sends: parts of tensors laid end to end, cut into buckets. Bucket b holds the stream's bytes
    [b * bucket_bytes, (b + 1) * bucket_bytes)."""

    entries: tuple[Entry, ...]
    bucket_bytes: int

    @property
    def total_bytes(self) -> int:
        return next((entry.offset + entry.num_bytes for entry in reversed(self.entries) if entry.num_bytes), 0)

    @property
    def num_buckets(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def staging_bytes(self) -> int:
        """Length of the longest bucket: the cap, or less when everything fits into one."""
        return min(self.bucket_bytes, self.total_bytes)

    def bucket_range(self, index: int) -> tuple[int, int]:
        """First byte of the stream in this bucket, and the first after it."""
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)

    def pieces(self, index: int) -> Iterator[Piece]:
        """The tensors, or parts of them, in this bucket, in order: at least one. Empty tensors are in no bucket."""
        low, high = self.bucket_range(index)
        position = bisect.bisect_right(self.entries, low, key=lambda entry: entry.offset) - 1
        for entry in map(self.entries.__getitem__, range(max(position, 0), len(self.entries))):
            if entry.offset >= high:
                return
            start, stop = max(low - entry.offset, 0), min(high - entry.offset, entry.num_bytes)
            if stop > start:
                yield Piece(entry, entry.first + start, entry.first + stop, entry.offset + start - low)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a run's syncs carry, agreed once before any optimizer exists. Made by `make_layout`.

    tied: alias -> the name that is sent for it. bucket_bytes: the cap of one bucket, or of the buckets of one number
    that several streams have under way. num_shards: None = one sender has gathered whole tensors, and the header has
    their digests; else the number of streams, of which stream s carries the s-th of that many chunks of rows of each
    tensor, which is what FSDP2 leaves in shard rank s. digest: how bytes are proven.
    """

    entries: tuple[Entry, ...]
    tied: dict[str, str] = field(default_factory=dict)
    bucket_bytes: int = 64 << 20
    num_shards: int | None = None
    digest: DigestKind = "sum64"

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        if self.num_shards is None:
            return (Stream(entries=self.entries, bucket_bytes=self.bucket_bytes),)
        cap = max(self.bucket_bytes // self.num_shards // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES
        shards = (_shard(self.entries, s, self.num_shards) for s in range(self.num_shards))
        return tuple(Stream(entries=entries, bucket_bytes=cap) for entries in shards)

    @property
    def total_bytes(self) -> int:
        """Of the tensors laid end to end; all streams together are that long but for gaps."""
        return next((entry.offset + entry.num_bytes for entry in reversed(self.entries) if entry.num_bytes), 0)

    @property
    def num_buckets(self) -> int:
        return sum(stream.num_buckets for stream in self.streams)

    @property
    def staging_bytes(self) -> int:
        """Length of the longest bucket of any stream."""
        return max(stream.staging_bytes for stream in self.streams)

    @cached_property
    def hash(self) -> str:
        """Stable over processes; both sides compare it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def bucket_range(self, index: int) -> tuple[int, int]:
        """`Stream.bucket_range` of the first stream, which is the only one unless there are shards."""
        return self.streams[0].bucket_range(index)

    def pieces(self, index: int) -> Iterator[Piece]:
        """`Stream.pieces` of the first stream, which is the only one unless there are shards."""
        return self.streams[0].pieces(index)


def _shard(entries: tuple[Entry, ...], shard: int, num_shards: int) -> tuple[Entry, ...]:
    """One shard's chunk of rows of each tensor, laid end to end."""
    parts, offset = [], 0
    for entry in entries:
        rows = entry.shape[0] if entry.shape else 1
        row_bytes = entry.num_bytes // rows if rows else 0
        low, high = shard_rows(rows, shard, num_shards)
        part = replace(entry, offset=offset, first=low * row_bytes, num_bytes=(high - low) * row_bytes)
        parts.append(part)
        offset += aligned(part.num_bytes)
    return tuple(parts)


def shard_rows(num_rows: int, shard: int, num_shards: int) -> tuple[int, int]:
    """First row of a shard, and the first after it, as FSDP2 cuts a tensor of so many rows."""
    chunk = -(-num_rows // num_shards)
    return min(chunk * shard, num_rows), min(chunk * (shard + 1), num_rows)


def aligned(num_bytes: int) -> int:
    """Rounded up to where the next tensor may begin."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def make_layout(
    tensors: Sequence[tuple[str, tuple[int, ...], str]],
    tied: dict[str, str] | None = None,
    bucket_bytes: int = 64 << 20,
    num_shards: int | None = None,
    digest: DigestKind = "sum64",
) -> Layout:
    """Lay (name, shape, dtype) end to end in the given order, each tensor aligned to 16 bytes.

    Raises: ValueError for a name given twice, an unknown dtype, a cap below the alignment, an alias of nothing.
    """
    if bucket_bytes < ALIGNMENT_BYTES:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; allowed: {ALIGNMENT_BYTES} or more, best 1 MiB and up")
    entries: list[Entry] = []
    seen: set[str] = set()
    offset = 0
    for name, shape, dtype in tensors:
        if name in seen:
            raise ValueError(
                f"{name} stands twice in the layout; a tied weight is sent once and its other names go into `tied`"
            )
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{name} has dtype {dtype!r}, which has no wire format; known: {', '.join(DTYPE_BYTES)}")
        num_bytes = DTYPE_BYTES[dtype] * math.prod(shape)
        entries.append(Entry(name=name, shape=tuple(shape), dtype=dtype, num_bytes=num_bytes, offset=offset))
        seen.add(name)
        offset += aligned(num_bytes)
    for alias, source in (tied or {}).items():
        if source not in seen or alias in seen:
            fault = "is sent itself" if alias in seen else f"is tied to {source}, which is not sent"
            raise ValueError(f"{alias} {fault}; `tied` maps a name that is not sent to one that is")
    return Layout(
        entries=tuple(entries),
        tied=dict(tied or {}),
        bucket_bytes=bucket_bytes,
        num_shards=num_shards,
        digest=digest,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncHeader:
    """Each sync: version (rises with every sync), base_version (None = full).

    digests: one 64-bit digest a tensor, of the trainer's own, so that they also vouch for the gathering and the
    cutting; None where the sender of each shard sends them with its buckets.
    """

    version: int
    base_version: int | None
    mode: SyncMode
    layout_hash: str
    digests: dict[str, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """The receiver's answer to commit: which proofs held. A proof that failed is a SyncError, never an Ack.

    wire: every bucket arrived with the digest it was sent with. resident: the parameters that the engine computes
    with, read back, have the trainer's digests; None = the engine can't read back, and says so. num_bytes: that came.
    num_changed: tensors whose digest is another than at the last commit; None where there was none to compare with.
    num_changed_elements: elements that are others than in the version before, where the senders compared them (delta).
    extra_bytes: buffers of this sync, and what is remembered for the next one, all senders together.
    seconds: "load" (bytes into place) and "verify" (digests) by the receiver; `send_weights` adds "gather" (waiting
    for the caller's buckets) and "send" (transport, and waiting for slower receivers). They add up to the whole. Where
    senders report themselves (`with_reports`), "gather" is their waiting for each other, "cast" their work on the
    bytes, "verify" of both sides together, and "send" what is left. Sides that work at the same time both count.
    """

    version: int
    receiver: str
    wire: bool
    resident: bool | None
    num_bytes: int
    num_tensors: int
    num_changed: int | None = None
    num_changed_elements: int | None = None
    extra_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
