"""What is sent (Layout, once a run), and what each sync says of it (SyncHeader, Ack). Names, slices and bytes only.

`sync` knows no model and no engine: the train engine yields (wire name, tensor), every engine consumes the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Literal

SyncMode = Literal["full", "delta", "adapter"]
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of the layout, in the sampler's dtype. offset: byte offset of its first byte in the stream of all
    buckets laid end to end; a tensor longer than the bucket cap spans several buckets."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a run's syncs carry, agreed once before any optimizer exists.

    tied: alias -> the name that is sent for it. bucket_bytes: the cap of one bucket; bucket b holds the stream's
    bytes [b * bucket_bytes, (b + 1) * bucket_bytes).
    """

    entries: tuple[Entry, ...]
    tied: dict[str, str] = field(default_factory=dict)
    bucket_bytes: int = 64 << 20

    @property
    def total_bytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].num_bytes if self.entries else 0

    @property
    def num_buckets(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def hash(self) -> str:
        """Stable over processes; both sides compare it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def make_layout(
    tensors: list[tuple[str, tuple[int, ...], str]], tied: dict[str, str] | None = None, bucket_bytes: int = 64 << 20
) -> Layout:
    """Lay (name, shape, dtype) end to end in the given order, each tensor aligned to 16 bytes."""
    entries, offset = [], 0
    for name, shape, dtype in tensors:
        num_bytes = DTYPE_BYTES[dtype]
        for size in shape:
            num_bytes *= size
        entries.append(Entry(name=name, shape=tuple(shape), dtype=dtype, num_bytes=num_bytes, offset=offset))
        offset += -(-num_bytes // 16) * 16
    return Layout(entries=tuple(entries), tied=dict(tied or {}), bucket_bytes=bucket_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncHeader:
    """Each sync: version (rises by one a sync), base_version (None = full), one 64-bit digest a tensor."""

    version: int
    base_version: int | None
    mode: SyncMode
    layout_hash: str
    digests: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """The receiver's answer to commit: which proofs held. resident None = the engine can't read back, and says so."""

    version: int
    receiver: str
    wire: bool
    resident: bool | None
    num_bytes: int
    num_tensors: int
    seconds: dict[str, float] = field(default_factory=dict)  # load, verify
