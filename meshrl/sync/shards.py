"""The sending half of one train rank: its own shards, cast straight into buckets, digested while they are in cache.

No rank gathers anything: each sends the stream of its shard (`Layout.streams`), and a receiver puts the streams
together. Sends everything, or (delta) what has changed in the sampler's dtype since the version sent before, exact to
the bit; a part that would not be smaller that way comes whole.

Memory: the staging buffers; with keep_base also what was sent last, in the sampler's dtype: 2 bytes a parameter of
this rank's shard in bf16. (Digests of blocks in its place would take less, and find nothing: at 2 % of elements
changed, scattered as an optimizer scatters them, every block of 512 has one, so that nearly everything would be sent.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import RunningDigest, as_bytes, digest_range
from meshrl.sync.manifest import DTYPE_BYTES, Entry, Layout, Piece, aligned
from meshrl.sync.receive import WHOLE, Bucket, bits_of, places_at, section_bytes

_CHUNK_BYTES = 1 << 20  # of one piece at a time: cast, digested and compared while a core's cache holds it


@dataclass(kw_only=True, slots=True)
class SendReport:
    """What one rank sent. num_changed: elements that differ from the version before, None when nothing was compared.
    seconds: "cast" (into the sampler's dtype and the bucket, and the search for changes), "verify" (digests)."""

    num_bytes: int = 0
    num_changed: int | None = None
    extra_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"cast": 0.0, "verify": 0.0})


class ShardSender:
    """One rank's stream, sync after sync.

    staging: uint8[stream.staging_bytes] or longer each, taken in turn; bucket b has to be consumed before bucket
    b + len(staging) is asked for. base_version: that which `delta` would start from; None = none.
    """

    def __init__(self, layout: Layout, shard: int, staging: Sequence[torch.Tensor], keep_base: bool):
        self.layout, self.shard, self.stream = layout, shard, layout.streams[shard]
        self.base_version: int | None = None
        self.report = SendReport()
        self._staging = staging
        self._keep_base = keep_base
        self._base: dict[str, torch.Tensor] = {}

    def buckets(self, tensors: Mapping[str, torch.Tensor], version: int, delta: bool = False) -> Iterator[Bucket]:
        """Everything, or what has changed since base_version. tensors: {wire name: this rank's rows of it, contiguous,
        in any floating dtype}.

        Raises: SyncError when a tensor is missing, or has another size than the layout says; ValueError for a delta
        from no base.
        """
        if delta and self.base_version is None:
            raise ValueError("a delta was asked for, but nothing was sent before it; send everything first")
        self.base_version = None  # until the last bucket is asked for, the base is of two versions
        flat = {entry.name: self._flat(entry, tensors) for entry in self.stream.entries}
        self._remember(flat)
        extra = [*self._staging, *self._base.values()]
        self.report = SendReport(
            num_changed=0 if delta else None, extra_bytes=sum(t.numel() * t.element_size() for t in extra)
        )
        for index in range(self.stream.num_buckets):
            start, stop = self.stream.bucket_range(index)
            payload = self._staging[index % len(self._staging)][: stop - start]
            bucket = self._changes(index, flat, payload) if delta else self._everything(index, flat, payload)
            self.report.num_bytes += bucket.payload.numel()
            yield bucket
        if self._keep_base:
            self.base_version = version

    def in_place(self, tensors: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> Iterator[Bucket]:
        """Everything, cast straight into the tensors of a receiver in this process: buckets without a payload, which
        say what the receiver has got. There is no shorter way, so no changes are looked for."""
        self.base_version, self.report = None, SendReport()
        flat = {entry.name: self._flat(entry, tensors) for entry in self.stream.entries}
        nothing = torch.empty(0, dtype=torch.uint8)
        for index in range(self.stream.num_buckets):
            digests = []
            for piece in self.stream.pieces(index):
                digests.append(
                    self._whole(
                        piece, flat[piece.entry.name], as_bytes(targets[piece.entry.name])[piece.start : piece.stop]
                    )
                )
                self.report.num_bytes += piece.stop - piece.start
            yield Bucket(
                index=index, payload=nothing, digest=0, stream=self.shard, pieces=tuple(digests), in_place=True
            )

    def _remember(self, flat: Mapping[str, torch.Tensor]) -> None:
        """Have memory for what is sent, if it is to be kept."""
        if not self._keep_base:
            self._base = {}
        elif not self._base:
            for entry in self.stream.entries:
                source = flat[entry.name]
                self._base[entry.name] = torch.empty_like(source, dtype=getattr(torch, entry.dtype))

    def _flat(self, entry: Entry, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors.get(entry.name)
        count = entry.num_bytes // DTYPE_BYTES[entry.dtype]
        if tensor is None or tensor.numel() != count or not tensor.is_contiguous():
            got = "nothing" if tensor is None else f"{list(tensor.shape)}, strides {tensor.stride()}"
            raise SyncError(
                f"shard {self.shard} of {entry.name} should be {count} elements in one run; the trainer has {got}"
            )
        return tensor.detach().view(-1)

    def _everything(self, index: int, flat: Mapping[str, torch.Tensor], payload: torch.Tensor) -> Bucket:
        end, digests = 0, []
        for piece in self.stream.pieces(index):
            payload[end : piece.at].zero_()
            end = piece.at + piece.stop - piece.start
            digests.append(self._whole(piece, flat[piece.entry.name], payload[piece.at : end]))
        payload[end:].zero_()
        return Bucket(index=index, payload=payload, digest=0, stream=self.shard, pieces=tuple(digests))

    def _whole(self, piece: Piece, source: torch.Tensor, payload: torch.Tensor) -> int:
        """Cast a piece into its place; returns its digest."""
        out = payload.view(getattr(torch, piece.entry.dtype))
        running = RunningDigest(self.layout.digest, piece.start)
        for low, high, base in self._chunks(piece):
            began = time.perf_counter()
            part = out[low[1] : high[1]]
            part.copy_(source[low[0] : high[0]])
            if base is not None:
                base.copy_(part)
            done = time.perf_counter()
            running.update(as_bytes(part))
            self._took(began, done)
        return running.value

    def _changes(self, index: int, flat: Mapping[str, torch.Tensor], payload: torch.Tensor) -> Bucket:
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

    def _changed(self, piece: Piece, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Places int32[N] in the piece, new bits there, and the digest of the whole piece as it is now; None when the
        piece itself is no longer than that."""
        running = RunningDigest(self.layout.digest, piece.start)
        places, values, count = [], [], 0
        for low, high, base in self._chunks(piece):
            assert base is not None, "a delta needs a base"
            began = time.perf_counter()
            now = source[low[0] : high[0]].to(base.dtype)
            found = _nonzero(bits_of(now) != bits_of(base))
            count += found.numel()
            places.append((found + low[1]).int())
            values.append(bits_of(now)[found])
            if found.numel():
                base.copy_(now)
            done = time.perf_counter()
            running.update(as_bytes(now))
            self._took(began, done)
        assert self.report.num_changed is not None
        self.report.num_changed += count
        if section_bytes(piece, count) > piece.stop - piece.start:
            return None
        return torch.cat(places), torch.cat(values), running.value

    def _chunks(self, piece: Piece) -> Iterator[tuple[tuple[int, int], tuple[int, int], torch.Tensor | None]]:
        """(first element in the shard, in the piece), the same of the end, and the base of these elements."""
        size, base = DTYPE_BYTES[piece.entry.dtype], self._base.get(piece.entry.name)
        first, count = (piece.start - piece.entry.first) // size, (piece.stop - piece.start) // size
        step = _CHUNK_BYTES // size if base is None or base.device.type == "cpu" else count
        for low in range(0, count, step):
            high = min(low + step, count)
            part = None if base is None else base[first + low : first + high]
            yield (first + low, low), (first + high, high), part

    def _took(self, began: float, done: float) -> None:
        self.report.seconds["cast"] += done - began
        self.report.seconds["verify"] += time.perf_counter() - done


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    """Places of True in bool[N]. numpy's search is five times torch's on a CPU."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]
