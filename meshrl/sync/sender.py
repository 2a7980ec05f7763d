"""The sending half of one train rank: casts its own boxes directly into a transfer, and computes the digest of each
part while the bytes are in a core's cache.

No rank gathers a tensor. A rank sends everything, or (delta) the elements that changed in the sampler's dtype since the
last version, exact to the bit; a part whose changes would not be smaller is sent in full.

Memory: keep_base stores what was sent last, in the sampler's dtype: 2 bytes for each parameter of this rank's boxes in
bf16. (Digests of blocks would take less memory, but do not help: with 2 % of the elements changed, all over the tensor,
nearly every block of 512 has a change, so nearly everything would be sent.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from meshrl.core.device import has_triton
from meshrl.core.errors import SyncError
from meshrl.sync.delivery import ALL, Delivery, pack_changes, section_bytes
from meshrl.sync.digest import (
    RunningDigest,
    Sums,
    as_bytes,
    bits_of,
    digest_bytes,
    digests_in_threads,
    lap,
    running_digest,
    values,
)
from meshrl.sync.layout import Layout, Part, Transfer, aligned

_Key = tuple[str, tuple[int, ...]]  # name and offsets, of a box or a part
_CHUNK_BYTES = 2048 << 10  # cast, digested and compared while in a core's cache


class Elements:
    """The elements of a block in order. Only the rows that are read are copied or computed."""

    def __init__(self, block: torch.Tensor, rows: Callable[[int, int], torch.Tensor] | None = None):
        """rows(first, end): returns the values to be sent for these rows; None = the block's own values."""
        self.block, self._rows = block, rows
        self.flat = block.view(-1) if rows is None and block.is_contiguous() else None  # the values, if stored so

    @property
    def device(self) -> torch.device:
        return self.block.device

    def numel(self) -> int:
        return self.block.numel()

    def __getitem__(self, part: slice) -> torch.Tensor:
        if self.flat is not None:
            return self.flat[part]
        low, high, _ = part.indices(self.numel())
        inner = self.numel() // len(self.block)
        first, end = low // inner, -(-high // inner)
        rows = self.block[first:end] if self._rows is None else self._rows(first, end)
        return rows.reshape(-1)[low - first * inner : high - first * inner]


class SourceBox(NamedTuple):
    """A box that a rank holds, and its elements."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    elements: Elements


@dataclass(kw_only=True, slots=True)
class SendReport:
    """What one rank sent. num_changed: elements that differ from the version before; None = nothing was compared.
    extra_bytes: memory of the base. lora_change: as in Ack. seconds: "cast" (to the sampler's dtype, into the transfer,
    and the search for changes), "verify" (digests)."""

    num_bytes: int = 0
    num_changed: int | None = None
    extra_bytes: int = 0
    lora_change: tuple[float, float] = (0.0, 0.0)
    seconds: dict[str, float] = field(default_factory=lambda: {"cast": 0.0, "verify": 0.0})


class WeightSender:
    """Makes the transfers of one rank for all syncs. Each sync: begin, then `fill` for each transfer in order or
    `write` for all of them, then finish.

    frozen: names of tensors that never change; they are read and sent once. shared: of these, those that are the
    receiver's own tensors; they are read once, and never sent. base_version: the version that a delta would start from;
    None = none.
    """

    def __init__(
        self,
        layout: Layout,
        sender: int,
        keep_base: bool,
        frozen: frozenset[str] = frozenset(),
        shared: frozenset[str] = frozenset(),
    ):
        self.layout, self.sender = layout, sender
        self.base_version: int | None = None
        self.report = SendReport()
        self._keep_base, self._frozen, self._shared = keep_base, frozen, shared
        self._digests: dict[_Key, int] = {}  # of the parts as they were sent last
        self._base: dict[_Key, torch.Tensor] = {}  # by box
        self._elements: dict[_Key, Elements] = {}
        self._changes = False
        self._scratch: torch.Tensor | None = None

    def begin(self, boxes_by_name: Mapping[str, Sequence[SourceBox]], changes: bool = False) -> None:
        """boxes_by_name: {name: this rank's boxes of it}, in any floating dtype. changes: send what changed since
        base_version: with keep_base the elements that differ, without it all tensors that are not frozen."""
        if changes and self.base_version is None:
            raise ValueError("a sync of changes was begun, but nothing was sent before; send everything first")
        self.base_version = None  # until the last transfer, the base is a mix of two versions
        by_box = {(name, box.offsets): box.elements for name, boxes in boxes_by_name.items() for box in boxes}
        self._elements = {}
        for box in self.layout.senders[self.sender]:
            elements, count = by_box.get((box.name, box.offsets)), math.prod(box.shape)
            if elements is None or elements.numel() != count:
                got = "nothing" if elements is None else f"{elements.numel()} elements"
                raise SyncError(
                    f"sender {self.sender}: the box of {box.name} at {list(box.offsets)} should be {count} elements; "
                    f"the trainer has {got}"
                )
            self._elements[box.name, box.offsets] = elements
            if self._keep_base and box.name not in self._frozen and (box.name, box.offsets) not in self._base:
                dtype = self.layout.by_name[box.name].torch_dtype
                self._base[box.name, box.offsets] = torch.empty(count, dtype=dtype, device=elements.device)
        self._changes = changes
        self.report = SendReport(
            num_changed=0 if changes and self._keep_base else None,
            extra_bytes=sum(base.nbytes for base in self._base.values()),
        )
        self._read_shared()

    def _read_shared(self) -> None:
        """The digests of shared tensors, once: later ones must have the values of the first sync."""

        def digest(part: Part) -> RunningDigest:
            elements = self._elements[part.tensor.name, part.box_offsets]
            return running_digest(self.layout.digest, elements[part.first : part.first + part.numel])

        started_at = time.perf_counter()
        own = [part for transfer in self.layout.transfers if transfer.sender == self.sender for part in transfer.parts]
        parts = [part for part in own if part.tensor.name in self._shared and _key(part) not in self._digests]
        digests = digests_in_threads(self.layout.digest, digest, parts, [part.num_bytes for part in parts])
        self._digests |= dict(zip(map(_key, parts), digests, strict=True))
        lap(self.report.seconds, "verify", started_at)

    def finish(self, version: int) -> None:
        """Record that all transfers of this version were sent."""
        self._elements = {}
        if self._keep_base or self._frozen:
            self.base_version = version

    def fill(self, transfer: Transfer, buffer: torch.Tensor) -> Delivery:
        """Write a transfer, or its changes, into buffer uint8[slot_bytes]."""
        payload, at, counts = buffer[: transfer.num_bytes], 0, []
        running: dict[_Key, RunningDigest] = {}
        for part in transfer.parts:
            count, end = ALL, at + part.num_bytes
            if not self._is_sent(part):
                count, end = 0, at
            elif self._changes and self._keep_base and (changes := self._find_changes(part)) is not None:
                indices, new, running[_key(part)] = changes
                count = len(indices)
                end = at + section_bytes(part, count)
                pack_changes(part, payload[at:end], indices, new)
            else:
                running[_key(part)] = self._cast_part(part, payload[at:end])
            counts.append(count)
            at = aligned(end)
            payload[end:at].zero_()
        payload = payload[:at]
        self.report.num_bytes += payload.numel()
        self._digests |= dict(zip(running, values(list(running.values())), strict=True))
        payload_digest = 0
        if max(counts) > 0:
            started_at = time.perf_counter()
            payload_digest = digest_bytes(self.layout.digest, payload)
            lap(self.report.seconds, "verify", started_at)
        return self._delivery(transfer, payload, counts, payload_digest)

    def write(self, targets: Mapping[str, torch.Tensor]) -> Iterator[Delivery]:
        """Cast directly into the tensors of a receiver in this process; yields deliveries without a payload. A search
        for changes would not save anything, so all tensors are written, or those that are not frozen."""
        transfers = [transfer for transfer in self.layout.transfers if transfer.sender == self.sender]
        written = [part for transfer in transfers for part in transfer.parts if self._is_sent(part)]
        self.report.num_bytes, self.report.num_changed = sum(part.num_bytes for part in written), None

        def write_part(part: Part) -> RunningDigest:
            target = part.of(targets[part.tensor.name])
            if target.is_contiguous():
                return self._cast_part(part, as_bytes(target))
            block = torch.empty(part.shape, dtype=target.dtype, device=target.device)
            running = self._cast_part(part, as_bytes(block))
            target.copy_(block)
            return running

        started_at = time.perf_counter()
        together = self._cast_together(written, targets)
        rest = [part for part in written if _key(part) not in together]
        digests = digests_in_threads(self.layout.digest, write_part, rest, [part.num_bytes for part in rest])
        self._digests |= together | dict(zip(map(_key, rest), digests, strict=True))
        spent = self.report.seconds  # of all threads together; scaled to the time that has passed
        share = min(1.0, (time.perf_counter() - started_at) / max(sum(spent.values()), 1e-9))
        self.report.seconds = {stage: seconds * share for stage, seconds in spent.items()}
        for transfer in transfers:
            yield self._delivery(transfer, None, [ALL if self._is_sent(part) else 0 for part in transfer.parts])

    def _cast_together(self, parts: Sequence[Part], targets: Mapping[str, torch.Tensor]) -> dict[_Key, int]:
        """Cast the parts for which there is a kernel, all in one launch for each dtype, which computes their digests,
        too. Returns these digests."""
        if self.layout.digest != "sum64" or not parts or not has_triton(targets[parts[0].tensor.name].device):
            return {}
        from meshrl.sync.kernels import can_cast

        started_at = time.perf_counter()
        casts: dict[torch.dtype, list[tuple[_Key, torch.Tensor, torch.Tensor]]] = {}
        for part in parts:
            target, dtype = part.of(targets[part.tensor.name]), part.tensor.torch_dtype
            box = part.tensor.name, part.box_offsets
            flat = None if box in self._base else self._elements[box].flat
            if flat is None or flat.device != target.device or not target.is_contiguous():
                continue
            source, raw = flat[part.first : part.first + part.numel], as_bytes(target)
            if can_cast(source, raw, dtype):
                casts.setdefault(dtype, []).append((_key(part), source, raw))
        sums, keys = Sums(), list[_Key]()
        for dtype, each in casts.items():
            pieces = [(number, raw, 0) for number, (_, _, raw) in enumerate(each)]
            sums.add_together(pieces, len(each), [source for _, source, _ in each], dtype)
            keys += [key for key, _, _ in each]
        digests = dict(zip(keys, sums.read(), strict=True))
        lap(self.report.seconds, "cast", started_at)
        return digests

    def _is_sent(self, part: Part) -> bool:
        name = part.tensor.name
        return name not in self._shared and not (self._changes and name in self._frozen)

    def _delivery(
        self, transfer: Transfer, payload: torch.Tensor | None, counts: Sequence[int], payload_digest: int = 0
    ) -> Delivery:
        return Delivery(
            transfer=transfer,
            payload=payload,
            digests=tuple(self._digests[_key(part)] for part in transfer.parts),
            counts=tuple(counts),
            payload_digest=payload_digest,
        )

    def _cast_part(self, part: Part, payload: torch.Tensor) -> RunningDigest:
        """Cast a part into `payload`. Returns its digest."""
        out = payload.view(part.tensor.torch_dtype)
        source = self._elements[part.tensor.name, part.box_offsets]
        running = RunningDigest(self.layout.digest)
        readable, since = running.readable(payload), time.perf_counter()
        is_moved = source.device != payload.device  # then cast and digested on the source's device, before it is moved
        for low, high, base in self._chunks(part, source.device):
            elements = source[part.first + low : part.first + high]
            if is_moved:
                elements = self._cast(elements, out.dtype)
            chunk = out[low:high].copy_(elements)
            if base is not None:
                base.copy_(elements if is_moved else chunk)
            since = lap(self.report.seconds, "cast", since)
            if is_moved:
                running.update(running.readable(as_bytes(elements)))
            else:
                running.update(readable[low * out.element_size() : high * out.element_size()])
            since = lap(self.report.seconds, "verify", since)
        return running

    def _find_changes(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, RunningDigest] | None:
        """Indices of changed elements and their new bits, int32[N] and [N], and the digest of the part; None if the
        part is shorter in full."""
        box = part.tensor.name, part.box_offsets
        source, base = self._elements[box], self._base[box]
        running, since = RunningDigest(self.layout.digest), time.perf_counter()
        indices, new, count = [], [], 0
        for low, high, before in self._chunks(part, source.device):
            assert before is not None
            elements = source[part.first + low : part.first + high]
            if has_triton(source.device):
                from meshrl.sync.kernels import take_changes

                changed, bits = take_changes(elements, before)
                now = before
            else:
                now = self._cast(elements, base.dtype)
                changed, bits = _differing(bits_of(now), bits_of(before))
                bits_of(before).scatter_(0, changed, bits)
            count += len(changed)
            indices.append((changed + low).int())
            new.append(bits)
            since = lap(self.report.seconds, "cast", since)
            running.update(running.readable(as_bytes(now)))
            since = lap(self.report.seconds, "verify", since)
        assert self.report.num_changed is not None
        self.report.num_changed += count
        if section_bytes(part, count) > part.num_bytes:
            return None
        return torch.cat(indices), torch.cat(new), running

    def _cast(self, elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The elements in this dtype; valid until the next call. The reused memory stays in a core's cache."""
        if elements.device.type != "cpu":
            return elements.to(dtype)
        if self._scratch is None or self._scratch.dtype != dtype:
            self._scratch = torch.empty(_CHUNK_BYTES // dtype.itemsize, dtype=dtype)
        return self._scratch[: elements.numel()].copy_(elements)

    def _chunks(self, part: Part, device: torch.device) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        """(start, end, base) of chunks of the part's elements. On a CPU chunks fit in a core's cache, accelerators get
        one large chunk."""
        base = self._base.get((part.tensor.name, part.box_offsets))
        count = part.numel
        step = _CHUNK_BYTES // part.tensor.torch_dtype.itemsize if device.type == "cpu" else max(count, 1)
        for low in range(0, count, step):
            high = min(low + step, count)
            yield low, high, None if base is None else base[part.first + low : part.first + high]


def _key(part: Part) -> _Key:
    return part.tensor.name, part.offsets


def _differing(now: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices at which two integer tensors differ, int64[N], and the values of `now` there. Uses numpy on a CPU: on one
    core its comparison of short integers is eight times as fast as torch's, and its search three times."""
    if now.device.type != "cpu":
        indices = (now != before).nonzero()[:, 0]
        return indices, now[indices]
    places = np.flatnonzero(now.numpy() != before.numpy())
    return torch.from_numpy(places), torch.from_numpy(now.numpy()[places])
