"""The sending half of one train rank: its own shards, cast straight into buckets, digested while they are in cache.

No rank gathers anything: each sends the stream of its shard (`Layout.streams`), and a receiver puts the streams
together. Sends everything, or (delta) what has changed in the sampler's dtype since the version sent before, exact to
the bit; a part that would not be smaller that way comes whole.

Memory: the staging buffers; with keep_base also what was sent last, in the sampler's dtype: 2 bytes a parameter of
this rank's shard in bf16. (Digests of blocks in its place would take less, and find nothing: at 2 % of elements
changed, scattered as an optimizer scatters them, every block of 512 has one, so that nearly everything would be sent.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import RunningDigest, as_bytes, digest_range
from meshrl.sync.manifest import DTYPE_BYTES, Entry, Layout, Piece, aligned
from meshrl.sync.receive import WHOLE, Bucket, bits_of, places_at, section_bytes
from meshrl.sync.threads import cores

_CHUNK_BYTES = 512 << 10  # of one piece at a time: cast, digested and compared while a core's cache holds it


@dataclass(kw_only=True, slots=True)
class SendReport:
    """What one rank sent. num_changed: elements that differ from the version before, None when nothing was compared.
    seconds: "cast" (into the sampler's dtype and the bucket, and the search for changes), "verify" (digests)."""

    num_bytes: int = 0
    num_changed: int | None = None
    extra_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"cast": 0.0, "verify": 0.0})


class Rows(Protocol):
    """A shard's rows of one tensor, laid end to end: a flat tensor, or what computes elements when they are read."""

    device: torch.device

    def numel(self) -> int: ...

    def is_contiguous(self) -> bool: ...

    def __getitem__(self, part: slice, /) -> torch.Tensor: ...


class ShardSender:
    """One rank's stream, sync after sync.

    staging: uint8[stream.staging_bytes] or longer each, taken in turn; bucket b has to be consumed before bucket
    b + len(staging) is asked for. frozen: names of tensors that stay as they are; they are read and sent once.
    base_version: that which a sync of changes alone would start from; None = none.
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        staging: Sequence[torch.Tensor],
        keep_base: bool,
        frozen: frozenset[str] = frozenset(),
    ):
        self.layout, self.shard, self.stream = layout, shard, layout.streams[shard]
        self.base_version: int | None = None
        self.report = SendReport()
        self._staging = staging
        self._keep_base = keep_base
        self._frozen = frozen
        self._lock = threading.Lock()
        self._digests: dict[tuple[str, int], int] = {}  # of frozen pieces, by name and first byte
        self._base: dict[str, torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def buckets(self, tensors: Mapping[str, Rows], version: int, changes: bool = False) -> Iterator[Bucket]:
        """Everything, or what has changed since base_version: elements that a search finds, with keep_base; without it
        all tensors that are not frozen. tensors: {wire name: this rank's rows of it, contiguous, in any floating
        dtype}.

        Raises: SyncError when a tensor is missing, or has another size than the layout says; ValueError for changes
        since no base.
        """
        flat = self._opened(tensors, changes)
        self._remember(flat)
        extra = [*self._staging, *self._base.values()]
        self.report = SendReport(
            num_changed=0 if changes and self._keep_base else None,
            extra_bytes=sum(t.numel() * t.element_size() for t in extra),
        )
        for index in range(self.stream.num_buckets):
            start, stop = self.stream.bucket_range(index)
            payload = self._staging[index % len(self._staging)][: stop - start]
            bucket = self._changes(index, flat, payload) if changes else self._everything(index, flat, payload)
            self.report.num_bytes += bucket.payload.numel()
            yield bucket
        if self._keep_base or self._frozen:
            self.base_version = version

    def in_place(
        self,
        tensors: Mapping[str, Rows],
        targets: Mapping[str, torch.Tensor],
        version: int,
        changes: bool = False,
    ) -> Iterator[Bucket]:
        """Cast straight into the tensors of a receiver in this process: buckets without a payload, which say what the
        receiver has got. There is no shorter way, so changes are not searched for: everything, or what is not frozen.
        """
        flat = self._opened(tensors, changes)
        self.report = SendReport()
        nothing = torch.empty(0, dtype=torch.uint8)
        buckets = [list(self.stream.pieces(index)) for index in range(self.stream.num_buckets)]
        moving = [p for pieces in buckets for p in pieces if not (changes and p.entry.name in self._frozen)]
        self.report.num_bytes = sum(piece.stop - piece.start for piece in moving)

        def write(piece: Piece) -> int:
            target = as_bytes(targets[piece.entry.name])
            return self._whole(piece, flat[piece.entry.name], target[piece.start : piece.stop])

        began = time.perf_counter()
        with cores(self.report.num_bytes if self.layout.digest == "xxh3" else 0) as pool:
            found = dict(zip(moving, pool.map(write, moving), strict=True))
        self._share(time.perf_counter() - began)
        for index, pieces in enumerate(buckets):
            yield Bucket(
                index=index,
                payload=nothing,
                digest=0,
                stream=self.shard,
                pieces=tuple(found[p] if p in found else self._digests[p.entry.name, p.start] for p in pieces),
                changes=tuple(WHOLE if p in found else 0 for p in pieces) if changes else None,
                in_place=True,
            )
        if self._frozen:
            self.base_version = version

    def _share(self, wall: float) -> None:
        """Seconds of several threads as parts of those that went by."""
        spent = self.report.seconds
        part = min(1.0, wall / max(sum(spent.values()), 1e-9))
        self.report.seconds = {stage: seconds * part for stage, seconds in spent.items()}

    def _opened(self, tensors: Mapping[str, Rows], changes: bool) -> dict[str, Rows]:
        """The tensors of this stream; from here to the last bucket, the base is of two versions."""
        if changes and self.base_version is None:
            raise ValueError("changes alone were asked for, but nothing was sent before; send everything first")
        self.base_version = None
        return {entry.name: self._flat(entry, tensors) for entry in self.stream.entries}

    def _remember(self, flat: Mapping[str, Rows]) -> None:
        """Have memory for what is sent, if it is to be kept."""
        if self._keep_base and not self._base:
            for entry in self.stream.entries:
                if entry.name not in self._frozen:
                    rows, dtype = flat[entry.name], getattr(torch, entry.dtype)
                    self._base[entry.name] = torch.empty(rows.numel(), dtype=dtype, device=rows.device)

    def _flat(self, entry: Entry, tensors: Mapping[str, Rows]) -> Rows:
        rows = tensors.get(entry.name)
        count = entry.num_bytes // DTYPE_BYTES[entry.dtype]
        if rows is None or rows.numel() != count or not rows.is_contiguous():
            got = "nothing" if rows is None else f"{rows.numel()}{'' if rows.is_contiguous() else ', not in one run'}"
            raise SyncError(
                f"shard {self.shard} of {entry.name} should be {count} elements in one run; the trainer has {got}"
            )
        return rows.detach().view(-1) if isinstance(rows, torch.Tensor) else rows

    def _everything(self, index: int, flat: Mapping[str, Rows], payload: torch.Tensor) -> Bucket:
        end, digests = 0, []
        for piece in self.stream.pieces(index):
            payload[end : piece.at].zero_()
            end = piece.at + piece.stop - piece.start
            digests.append(self._whole(piece, flat[piece.entry.name], payload[piece.at : end]))
        payload[end:].zero_()
        return Bucket(index=index, payload=payload, digest=0, stream=self.shard, pieces=tuple(digests))

    def _whole(self, piece: Piece, source: Rows, payload: torch.Tensor) -> int:
        """Cast a piece into its place; returns its digest."""
        out, size = payload.view(getattr(torch, piece.entry.dtype)), DTYPE_BYTES[piece.entry.dtype]
        running = RunningDigest(self.layout.digest, piece.start)
        readable, clock = running.readable(payload), _Clock()
        for low, high, base in self._chunks(piece, source.device):
            part = out[low[1] : high[1]]
            part.copy_(source[low[0] : high[0]])
            if base is not None:
                base.copy_(part)
            clock.lap("cast")
            running.update(readable[low[1] * size : high[1] * size])
            clock.lap("verify")
        self._took(clock)
        if piece.entry.name in self._frozen:
            self._digests[piece.entry.name, piece.start] = running.value
        return running.value

    def _changes(self, index: int, flat: Mapping[str, Rows], payload: torch.Tensor) -> Bucket:
        end, digests, changes = 0, [], []
        for piece in self.stream.pieces(index):
            found = self._changed(piece, flat[piece.entry.name])
            size = DTYPE_BYTES[piece.entry.dtype]
            count = WHOLE if found is None else found[0].numel()
            section = payload[end : end + section_bytes(piece, count)]
            if found is None:
                value = self._whole(piece, flat[piece.entry.name], section)
            else:
                places, values, value = found
                section[: count * size].copy_(as_bytes(values))
                section[places_at(piece, count) :].copy_(as_bytes(places))
            digests.append(value)
            changes.append(count)
            end += aligned(section.numel())
        began = time.perf_counter()
        sent = payload[: min(end, payload.numel())]
        value = digest_range(self.layout.digest, sent)
        self.report.seconds["verify"] += time.perf_counter() - began
        return Bucket(
            index=index, payload=sent, digest=value, stream=self.shard, pieces=tuple(digests), changes=tuple(changes)
        )

    def _changed(self, piece: Piece, source: Rows) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Places int32[N] in the piece, new bits there, and the digest of the whole piece as it is now; None when the
        piece itself is no longer than that, or nothing is known of its elements."""
        if piece.entry.name in self._frozen:
            nothing = torch.empty(0, dtype=torch.int32)
            return nothing, nothing, self._digests[piece.entry.name, piece.start]
        if piece.entry.name not in self._base:
            return None
        running, clock = RunningDigest(self.layout.digest, piece.start), _Clock()
        places, values, count = [], [], 0
        for low, high, base in self._chunks(piece, source.device):
            assert base is not None
            now = self._cast(source[low[0] : high[0]], base.dtype)
            found, bits = _differing(bits_of(now), bits_of(base))
            count += found.numel()
            places.append((found + low[1]).int())
            values.append(bits)
            bits_of(base).scatter_(0, found, bits)
            clock.lap("cast")
            running.update(running.readable(as_bytes(now)))
            clock.lap("verify")
        self._took(clock)
        assert self.report.num_changed is not None
        self.report.num_changed += count
        if section_bytes(piece, count) > piece.stop - piece.start:
            return None
        return torch.cat(places), torch.cat(values), running.value

    def _cast(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """In this dtype; valid until the next call. Memory that is used again and again stays in a core's cache."""
        if part.device.type != "cpu":
            return part.to(dtype)
        if self._scratch.dtype != dtype:
            self._scratch = torch.empty(_CHUNK_BYTES // dtype.itemsize, dtype=dtype)
        return self._scratch[: part.numel()].copy_(part)

    def _chunks(
        self, piece: Piece, device: torch.device
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int], torch.Tensor | None]]:
        """(first element in the shard, in the piece), the same of the end, and the base of these elements. A core wants
        parts that its cache holds, an accelerator few and large ones."""
        size, base = DTYPE_BYTES[piece.entry.dtype], self._base.get(piece.entry.name)
        first, count = (piece.start - piece.entry.first) // size, (piece.stop - piece.start) // size
        step = _CHUNK_BYTES // size if device.type == "cpu" else max(count, 1)
        for low in range(0, count, step):
            high = min(low + step, count)
            part = None if base is None else base[first + low : first + high]
            yield (first + low, low), (first + high, high), part

    def _took(self, clock: _Clock) -> None:
        with self._lock:
            for part, seconds in clock.seconds.items():
                self.report.seconds[part] += seconds


class _Clock:
    """Seconds by what they went into."""

    def __init__(self) -> None:
        self.seconds = {"cast": 0.0, "verify": 0.0}
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._since
        self._since = now


def _differing(now: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places at which two runs of integers differ, int64[N], and what `now` has there. On a CPU by numpy, whose
    comparison of short integers is eight times as fast as torch's on one core, and its search three times."""
    if now.device.type != "cpu":
        places = (now != before).nonzero()[:, 0]
        return places, now[places]
    found = np.flatnonzero(now.numpy() != before.numpy())
    return torch.from_numpy(found), torch.from_numpy(now.numpy()[found])
