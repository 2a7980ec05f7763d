"""What is sent (Layout, once a run), and what each sync says of it (SyncHeader, Ack). Names, slices and bytes only.

`sync` knows no model and no engine: the train engine yields (wire name, tensor), every engine consumes the same.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

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
    """One tensor of the layout, in the sampler's dtype. offset: byte offset of its first byte in the stream of all
    buckets laid end to end; a tensor longer than the bucket cap spans several buckets.

    Example: Entry(name="model.norm.weight", shape=(64,), dtype="bfloat16", num_bytes=128, offset=4096)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    offset: int


class Piece(NamedTuple):
    """What one bucket holds of one tensor: bytes [start, stop) of the tensor, from byte `at` of the bucket on."""

    entry: Entry
    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a run's syncs carry, agreed once before any optimizer exists. Made by `make_layout`.

    tied: alias -> the name that is sent for it. bucket_bytes: the cap of one bucket; bucket b holds the stream's
    bytes [b * bucket_bytes, (b + 1) * bucket_bytes).
    """

    entries: tuple[Entry, ...]
    tied: dict[str, str] = field(default_factory=dict)
    bucket_bytes: int = 64 << 20

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

    @property
    def hash(self) -> str:
        """Stable over processes; both sides compare it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

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
                yield Piece(entry, start, stop, entry.offset + start - low)


def make_layout(
    tensors: Sequence[tuple[str, tuple[int, ...], str]],
    tied: dict[str, str] | None = None,
    bucket_bytes: int = 64 << 20,
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
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    for alias, source in (tied or {}).items():
        if source not in seen or alias in seen:
            fault = "is sent itself" if alias in seen else f"is tied to {source}, which is not sent"
            raise ValueError(f"{alias} {fault}; `tied` maps a name that is not sent to one that is")
    return Layout(entries=tuple(entries), tied=dict(tied or {}), bucket_bytes=bucket_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncHeader:
    """Each sync: version (rises with every sync), base_version (None = full), one 64-bit digest a tensor.

    digests are those of the trainer's own tensors, so that they also vouch for the gathering and the cutting.
    """

    version: int
    base_version: int | None
    mode: SyncMode
    layout_hash: str
    digests: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """The receiver's answer to commit: which proofs held. A proof that failed is a SyncError, never an Ack.

    wire: every bucket arrived with the digest it was sent with. resident: the parameters that the engine computes
    with, read back, have the header's digests; None = the engine can't read back, and says so.
    seconds: "load" (bytes into place) and "verify" (digests) by the receiver; `send_weights` adds "gather" (waiting
    for the caller's buckets) and "send" (transport, and waiting for slower receivers). They add up to the whole.
    """

    version: int
    receiver: str
    wire: bool
    resident: bool | None
    num_bytes: int
    num_tensors: int
    seconds: dict[str, float] = field(default_factory=dict)
