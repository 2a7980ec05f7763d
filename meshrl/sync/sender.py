"""The sending half of one train rank: its own boxes, cast straight into a transfer, with the digest of each part taken
while the bytes are in a core's cache.

No rank gathers anything. Sends everything, or (delta) what has changed in the sampler's dtype since the version sent
before, exact to the bit; a part that would not be smaller that way is sent in full.

Memory: with keep_base what was sent last, in the sampler's dtype: 2 bytes a parameter of this rank's boxes in bf16.
(Digests of blocks in its place would take less, and find nothing: at 2 % of elements changed, scattered as an optimizer
scatters them, every block of 512 has one, so that nearly everything would be sent.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.delivery import ALL, Delivery, places_at, section_bytes
from meshrl.sync.digest import RunningDigest, as_bytes, bits_of, digest_bytes, values
from meshrl.sync.layout import Layout, Part, Transfer, aligned
from meshrl.sync.threads import cores

_Key = tuple[str, tuple[int, ...]]  # name and offsets, of a box or a part
_CHUNK_BYTES = 512 << 10  # of one part at a time: cast, digested and compared while a core's cache holds it


class Elements(Protocol):
    """The elements of a box in order: a flat tensor, or what computes them when they are read."""

    @property
    def device(self) -> torch.device: ...

    def numel(self) -> int: ...

    def __getitem__(self, part: slice, /) -> torch.Tensor: ...


class BlockElements:
    """The elements of a block of any strides; only what is read is copied, and nothing if the block is contiguous."""

    def __init__(self, block: torch.Tensor):
        self.block, self.device = block, block.device
        self._flat = block.view(-1) if block.is_contiguous() else None

    def numel(self) -> int:
        return self.block.numel()

    def __getitem__(self, part: slice) -> torch.Tensor:
        if self._flat is not None:
            return self._flat[part]
        low, high, _ = part.indices(self.numel())
        inner = self.numel() // self.block.shape[0]
        first = low // inner
        return self.block[first : -(-high // inner)].reshape(-1)[low - first * inner : high - first * inner]


class Held(NamedTuple):
    """A box that a rank holds, by its place in the tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    elements: Elements


@dataclass(kw_only=True, slots=True)
class SendReport:
    """What one rank sent. num_changed: elements that differ from the version before, None when nothing was compared.
    seconds: "cast" (into the sampler's dtype and the transfer, and the search for changes), "verify" (digests)."""

    num_bytes: int = 0
    num_changed: int | None = None
    extra_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"cast": 0.0, "verify": 0.0})


class WeightSender:
    """One rank's transfers, sync after sync: begin, `fill` or `write` for each of them in order, finish.

    frozen: names of tensors that stay as they are; they are read and sent once. base_version: that which a sync of
    changes alone would start from; None = none.
    """

    def __init__(self, layout: Layout, sender: int, keep_base: bool, frozen: frozenset[str] = frozenset()):
        self.layout, self.sender = layout, sender
        self.base_version: int | None = None
        self.report = SendReport()
        self._keep_base, self._frozen = keep_base, frozen
        self._lock = threading.Lock()
        self._digests: dict[_Key, int] = {}  # of frozen parts
        self._base: dict[_Key, torch.Tensor] = {}  # by box
        self._held: dict[_Key, Elements] = {}
        self._changes = False
        self._scratch: torch.Tensor | None = None

    def begin(self, held: Mapping[str, Sequence[Held]], changes: bool = False) -> None:
        """held: {name: this rank's boxes of it}, in any floating dtype. changes: send what has changed since
        base_version: elements that a search finds, with keep_base; without it all tensors that are not frozen.

        Raises: SyncError when a box is missing, or has another size than the layout states; ValueError for changes
        since no base.
        """
        if changes and self.base_version is None:
            raise ValueError("only changes were asked for, but nothing was sent before; send everything first")
        self.base_version = None  # until the last transfer, the base is of two versions
        found = {(name, box.offsets): box.elements for name, boxes in held.items() for box in boxes}
        self._held = {}
        for box in self.layout.senders[self.sender]:
            elements, count = found.get((box.name, box.offsets)), int(np.prod(box.shape, dtype=np.int64))
            if elements is None or elements.numel() != count:
                got = "nothing" if elements is None else f"{elements.numel()} elements"
                raise SyncError(
                    f"sender {self.sender}: the box of {box.name} at {list(box.offsets)} should be {count} elements; "
                    f"the trainer has {got}"
                )
            self._held[box.name, box.offsets] = elements
            if self._keep_base and box.name not in self._frozen and (box.name, box.offsets) not in self._base:
                dtype = self.layout.by_name[box.name].torch_dtype
                self._base[box.name, box.offsets] = torch.empty(count, dtype=dtype, device=elements.device)
        self._changes = changes
        self.report = SendReport(
            num_changed=0 if changes and self._keep_base else None,
            extra_bytes=sum(t.numel() * t.element_size() for t in self._base.values()),
        )

    def finish(self, version: int) -> None:
        """All transfers were sent, as this version."""
        self._held = {}
        if self._keep_base or self._frozen:
            self.base_version = version

    def fill(self, transfer: Transfer, buffer: torch.Tensor) -> Delivery:
        """Put a transfer, or what has changed of it, into uint8[slot_bytes]."""
        payload = buffer[: transfer.num_bytes]
        delivery = self._fill_changes(transfer, payload) if self._changes else self._fill_all(transfer, payload)
        self.report.num_bytes += delivery.num_bytes
        return delivery

    def write(self, targets: Mapping[str, torch.Tensor]) -> Iterator[Delivery]:
        """Cast straight into the tensors of a receiver in this process: deliveries without a payload. There is no
        shorter way, so changes are not searched for: everything is written, or what is not frozen."""
        transfers = [t for t in self.layout.transfers if t.sender == self.sender]
        moving = [p for t in transfers for p in t.parts if not (self._changes and p.tensor.name in self._frozen)]
        self.report.num_bytes, self.report.num_changed = sum(part.num_bytes for part in moving), None

        def into(part: Part) -> RunningDigest:
            target = part.of(targets[part.tensor.name])
            if target.is_contiguous():
                return self._all_of(part, as_bytes(target))
            block = torch.empty(part.shape, dtype=target.dtype, device=target.device)
            running = self._all_of(part, as_bytes(block))
            target.copy_(block)
            return running

        began = time.perf_counter()
        with cores(self.report.num_bytes if self.layout.digest == "xxh3" else 0) as pool:
            running = list(pool.map(into, moving))
        found = self._digested(moving, running)
        self._share(time.perf_counter() - began)
        for transfer in transfers:
            keys = [_key(part) for part in transfer.parts]
            yield Delivery(
                transfer=transfer,
                payload=None,
                digests=tuple(found[key] if key in found else self._digests[key] for key in keys),
                counts=tuple(ALL if key in found else 0 for key in keys) if self._changes else None,
            )

    def _share(self, wall: float) -> None:
        """Seconds of several threads as parts of those that went by."""
        spent = self.report.seconds
        part = min(1.0, wall / max(sum(spent.values()), 1e-9))
        self.report.seconds = {stage: seconds * part for stage, seconds in spent.items()}

    def _fill_all(self, transfer: Transfer, payload: torch.Tensor) -> Delivery:
        end, running = 0, []
        for part in transfer.parts:
            payload[end : part.at].zero_()
            end = part.end
            running.append(self._all_of(part, payload[part.at : end]))
        digests = self._digested(transfer.parts, running).values()
        return Delivery(transfer=transfer, payload=payload, digests=tuple(digests))

    def _digested(self, parts: Sequence[Part], running: Sequence[RunningDigest]) -> dict[_Key, int]:
        """The digest of each part; those of frozen tensors are stored."""
        found = dict(zip(map(_key, parts), values(running), strict=True))
        self._digests |= {key: digest for key, digest in found.items() if key[0] in self._frozen}
        return found

    def _all_of(self, part: Part, payload: torch.Tensor) -> RunningDigest:
        """Cast a part into its place; its digest."""
        out = payload.view(part.tensor.torch_dtype)
        source = self._held[part.tensor.name, part.held]
        running = RunningDigest(self.layout.digest)
        readable, clock = running.readable(payload), _Clock()
        for low, high, base in self._chunks(part, source.device):
            chunk = out[low:high]
            chunk.copy_(source[part.first + low : part.first + high])
            if base is not None:
                base.copy_(chunk)
            clock.lap("cast")
            running.update(readable[low * out.element_size() : high * out.element_size()])
            clock.lap("verify")
        self._add(clock)
        return running

    def _fill_changes(self, transfer: Transfer, payload: torch.Tensor) -> Delivery:
        """The changed elements of each part; one that would not be shorter that way is put there in full."""
        at, counts = 0, []
        running: dict[Part, RunningDigest] = {}
        for part in transfer.parts:
            if part.tensor.name in self._frozen:
                counts.append(0)
                continue
            found = self._changes_of(part) if self._keep_base else None
            if found is None:
                end = at + part.num_bytes
                running[part] = self._all_of(part, payload[at:end])
                counts.append(ALL)
            else:
                places, new, running[part] = found
                end = at + section_bytes(part, len(places))
                section = payload[at:end]
                values_end = len(places) * new.element_size()
                section[:values_end].view(new.dtype).copy_(new)
                section[values_end : places_at(part, len(places))].zero_()
                section[places_at(part, len(places)) :].view(torch.int32).copy_(places)
                counts.append(len(places))
            payload[end : min(aligned(end), len(payload))].zero_()
            at = aligned(end)
        payload = payload[: min(at, len(payload))]
        began = time.perf_counter()
        whole = digest_bytes(self.layout.digest, payload)
        self.report.seconds["verify"] += time.perf_counter() - began
        digests = self._digests | self._digested(list(running), list(running.values()))
        return Delivery(
            transfer=transfer,
            payload=payload,
            digests=tuple(digests[_key(part)] for part in transfer.parts),
            counts=tuple(counts),
            payload_digest=whole,
        )

    def _changes_of(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, RunningDigest] | None:
        """Places of changed elements and their new bits, int32[N] and [N], and the digest of the part; None when it is
        shorter in full. The base is then as before: who sends the part in full writes it."""
        source, base = self._held[part.tensor.name, part.held], self._base[part.tensor.name, part.held]
        running, clock = RunningDigest(self.layout.digest), _Clock()
        places, new, count = [], [], 0
        for low, high, before in self._chunks(part, source.device):
            assert before is not None
            now = self._cast(source[part.first + low : part.first + high], base.dtype)
            found, bits = _differing(bits_of(now), bits_of(before))
            count += len(found)
            places.append((found + low).int())
            new.append(bits)
            bits_of(before).scatter_(0, found, bits)
            clock.lap("cast")
            running.update(running.readable(as_bytes(now)))
            clock.lap("verify")
        self._add(clock)
        assert self.report.num_changed is not None
        self.report.num_changed += count
        if section_bytes(part, count) > part.num_bytes:
            return None
        return torch.cat(places), torch.cat(new), running

    def _cast(self, elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """In this dtype; valid until the next call. Memory that is used again and again stays in a core's cache."""
        if elements.device.type != "cpu":
            return elements.to(dtype)
        if self._scratch is None or self._scratch.dtype != dtype:
            self._scratch = torch.empty(_CHUNK_BYTES // dtype.itemsize, dtype=dtype)
        return self._scratch[: elements.numel()].copy_(elements)

    def _chunks(self, part: Part, device: torch.device) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        """(first element in the part, the one after the last, the base of these elements). A core wants pieces that its
        cache holds, an accelerator few and large ones."""
        base = self._base.get((part.tensor.name, part.held))
        count = part.numel
        step = _CHUNK_BYTES // part.tensor.torch_dtype.itemsize if device.type == "cpu" else max(count, 1)
        for low in range(0, count, step):
            high = min(low + step, count)
            yield low, high, None if base is None else base[part.first + low : part.first + high]

    def _add(self, clock: _Clock) -> None:
        with self._lock:
            for stage, seconds in clock.seconds.items():
                self.report.seconds[stage] += seconds


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds = {"cast": 0.0, "verify": 0.0}
        self._since = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now


def _key(part: Part) -> _Key:
    return part.tensor.name, part.offsets


def _differing(now: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places at which two rows of integers differ, int64[N], and what `now` has there. On a CPU by numpy, whose
    comparison of short integers is eight times as fast as torch's on one core, and its search three times."""
    if now.device.type != "cpu":
        places = (now != before).nonzero()[:, 0]
        return places, now[places]
    found = np.flatnonzero(now.numpy() != before.numpy())
    return torch.from_numpy(found), torch.from_numpy(now.numpy()[found])
