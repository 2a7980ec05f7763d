"""What a run's syncs send (Layout), and the header and acknowledgement of each sync (SyncHeader, Ack).

A box is a block of one tensor: (name, offsets, shape). Every train rank lists the boxes that it holds, by hub name, so
sharding on any dim or mesh axis, replicas and tied tensors need no special code here. A transfer is what a sender sends
at once: boxes of its own, packed up to a number of bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import count, groupby, zip_longest
from typing import Any, Literal, NamedTuple

import torch

from meshrl.parallel.boxes import index_of, overlap
from meshrl.sync.digest import DigestKind

SyncMode = Literal["full", "delta", "adapter"]
_FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
DTYPES = {name: getattr(torch, name) for name in (*_FLOATS, "int64", "int32", "int16", "int8", "uint8")}
ALIGNMENT_BYTES = 16  # of each part's first byte in a transfer; the gaps are zero and unused


class TensorSpec(NamedTuple):
    """A tensor of the layout: its hub name, and the sampler's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class Box(NamedTuple):
    """The block [offsets, offsets + shape) of a tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class Part(NamedTuple):
    """A box, or a part of one, at byte `at` of a transfer, its elements in order. box_offsets: of the sender's
    box that it is part of. first: the index of its first element in that box."""

    tensor: TensorSpec
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    box_offsets: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.tensor.torch_dtype.itemsize

    @property
    def end(self) -> int:
        return self.at + self.num_bytes

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """The view of the full tensor that this part fills."""
        return full[index_of((self.offsets, self.shape))]

    def __str__(self) -> str:
        if self.shape == self.tensor.shape:
            return self.tensor.name
        return f"{self.tensor.name}[{', '.join(f'{a}:{a + n}' for a, n in zip(self.offsets, self.shape, strict=True))}]"


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one sender sends at once: at least one part. number: its place in the list of all transfers. index: its
    place among the transfers of this sender."""

    number: int
    sender: int
    index: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return self.parts[-1].end

    def __str__(self) -> str:
        first, last = self.parts[0], self.parts[-1]
        carried = str(first) if first is last else f"{first} to {last}"
        return f"transfer {self.number} of sender {self.sender} ({carried})"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a run's syncs send; agreed on once. Made by `make_layout`.

    senders: the boxes of each sender, in the order of the tensors; each element is sent once. tied: alias -> the name
    that is sent for it. transfer_bytes: limit for the sum of the concurrent transfers of all senders. digest: the kind
    of digest that verifies the bytes.
    """

    tensors: tuple[TensorSpec, ...]
    senders: tuple[tuple[Box, ...], ...]
    tied: dict[str, str] = field(default_factory=dict)
    transfer_bytes: int = 64 << 20
    digest: DigestKind = "xxh3"

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def windows(self) -> tuple[tuple[Transfer, ...], ...]:
        """All transfers: at most one of each sender in a window, and the windows in the order of the tensors. So a
        receiver that needs full tensors holds at most one incomplete tensor in addition to the transfers."""
        return tuple(_windows(self))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(transfer for window in self.windows for transfer in window)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """Length of the longest transfer."""
        return max((transfer.num_bytes for transfer in self.transfers), default=0)

    @cached_property
    def hash(self) -> str:
        """Equal in all processes for the same layout; both sides compare it."""
        return hashlib.sha256(json.dumps(layout_to_json(self), sort_keys=True).encode()).hexdigest()[:16]


def make_layout(
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    boxes_of_ranks: Sequence[Sequence[Box]] | None = None,
    tied: Mapping[str, str] | None = None,
    transfer_bytes: int = 64 << 20,
    digest: DigestKind = "xxh3",
) -> Layout:
    """tensors: {name: (shape, dtype)}, in the order of sending. boxes_of_ranks: the boxes of each rank; if several
    ranks hold the same box, the first one sends it. None = one sender holds everything."""
    if transfer_bytes < ALIGNMENT_BYTES:
        raise ValueError(f"transfer_bytes is {transfer_bytes}; allowed: {ALIGNMENT_BYTES} or more, best 1 MiB and up")
    specs = {name: TensorSpec(name, tuple(shape), dtype) for name, (shape, dtype) in tensors.items()}
    for spec in specs.values():
        if spec.dtype not in DTYPES:
            raise ValueError(f"{spec.name} has dtype {spec.dtype!r}, which can't be sent; allowed: {', '.join(DTYPES)}")
    for alias, source in (tied or {}).items():
        if source not in specs or alias in specs:
            fault = "is sent itself" if alias in specs else f"is tied to {source}, which is not sent"
            raise ValueError(f"{alias} {fault}; `tied` maps a name that is not sent to one that is")
    if boxes_of_ranks is None:
        boxes_of_ranks = [[Box(spec.name, (0,) * len(spec.shape), spec.shape) for spec in specs.values()]]
    sender_of: dict[Box, int] = {}
    for sender, boxes in enumerate(boxes_of_ranks):
        for box in boxes:
            if box.name not in specs:
                raise ValueError(
                    f"a rank holds a box of {box.name}, which is not one of the {len(specs)} tensors of the layout"
                )
            if math.prod(box.shape):
                sender_of.setdefault(box, sender)
    _require_cover(specs, set(sender_of))
    names = _interleaved(list(specs), sender_of)
    order = {name: number for number, name in enumerate(names)}
    senders: list[list[Box]] = [[] for _ in boxes_of_ranks]
    for box in sorted(sender_of, key=lambda box: (order[box.name], box.offsets)):
        senders[sender_of[box]].append(box)
    return Layout(
        tensors=tuple(specs[name] for name in names),
        senders=tuple(map(tuple, senders)),
        tied=dict(tied or {}),
        transfer_bytes=transfer_bytes,
        digest=digest,
    )


def _interleaved(names: Sequence[str], sender_of: Mapping[Box, int]) -> list[str]:
    """The names, reordered where successive tensors have one sender each, like the experts of a layer: the senders then
    alternate, so that all of them send at the same time."""
    senders: dict[str, set[int]] = {}
    for box, sender in sender_of.items():
        senders.setdefault(box.name, set()).add(sender)
    ordered: list[str] = []
    for alone, group in groupby(names, key=lambda name: len(senders.get(name, ())) == 1):
        of_sender: dict[int, list[str]] = {}
        for name in group:
            of_sender.setdefault(min(senders[name]) if alone else 0, []).append(name)
        ordered += [name for turn in zip_longest(*of_sender.values()) for name in turn if name is not None]
    return ordered


def _require_cover(specs: Mapping[str, TensorSpec], boxes: set[Box]) -> None:
    """Check that every element of every tensor is in exactly one box."""
    by_name: dict[str, list[Box]] = {name: [] for name in specs}
    for box in boxes:
        by_name[box.name].append(box)
    for name, name_boxes in by_name.items():
        shape = specs[name].shape
        for box in name_boxes:
            if len(box.shape) != len(shape) or overlap(box[1:], ((0,) * len(shape), shape)) != box[1:]:
                raise ValueError(f"the box {list(box.shape)} at {list(box.offsets)} is not inside {name} {list(shape)}")
        name_boxes.sort(key=lambda box: box.offsets)
        for number, box in enumerate(name_boxes):
            for later in name_boxes[number + 1 :]:
                if later.offsets[0] >= box.offsets[0] + box.shape[0]:
                    break
                if overlap(box[1:], later[1:]):
                    raise ValueError(f"{name}: the boxes at {list(box.offsets)} and {list(later.offsets)} overlap")
        count = sum(math.prod(box.shape) for box in name_boxes)
        if count != math.prod(shape):
            raise ValueError(f"{name}: the ranks hold {count} of {math.prod(shape)} elements; nothing sends the rest")


def _windows(layout: Layout) -> Iterator[tuple[Transfer, ...]]:
    """The boxes of each sender, cut and packed into transfers of at most the limit."""
    num_senders = len(layout.senders)
    limit = max(layout.transfer_bytes // max(num_senders, 1) // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES
    parts_of: list[dict[str, list[Part]]] = [{} for _ in layout.senders]
    for boxes, sender_parts in zip(layout.senders, parts_of):
        for box in boxes:
            tensor, first = layout.by_name[box.name], 0
            for offsets, shape in _cut(box.offsets, box.shape, max(limit // tensor.torch_dtype.itemsize, 1)):
                part = Part(tensor, offsets, shape, 0, box.offsets, first)
                sender_parts.setdefault(box.name, []).append(part)
                first += part.numel
    open_parts: list[list[Part]] = [[] for _ in layout.senders]
    number, indices = count(), [count() for _ in layout.senders]

    def close() -> tuple[Transfer, ...]:
        sending = [(sender, tuple(parts)) for sender, parts in enumerate(open_parts) if parts]
        for parts in open_parts:
            parts.clear()
        return tuple(Transfer(next(number), sender, next(indices[sender]), parts) for sender, parts in sending)

    for tensor in layout.tensors:
        for turn in zip_longest(*(sender_parts.get(tensor.name, ()) for sender_parts in parts_of)):
            for parts, part in zip(open_parts, turn):
                if part is None:
                    continue
                at = aligned(parts[-1].end) if parts else 0
                if parts and at + part.num_bytes > limit:
                    yield close()
                    at = 0
                parts.append(part._replace(at=at))
    if any(open_parts):
        yield close()


def _cut(
    offsets: tuple[int, ...], shape: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A box as (offsets, shape) of boxes of at most `most` elements, in the order of the elements."""
    if math.prod(shape) <= most:
        yield offsets, shape
        return
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    step = max(most // math.prod(shape[dim + 1 :]), 1)
    for low in range(0, shape[dim], step):
        start = (*offsets[:dim], offsets[dim] + low, *offsets[dim + 1 :])
        yield from _cut(start, (*shape[:dim], min(step, shape[dim] - low), *shape[dim + 1 :]), most)


def aligned(num_bytes: int) -> int:
    """num_bytes rounded up to the alignment, where the next part may start."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """The layout as an object that JSON can store."""
    return {field.name: getattr(layout, field.name) for field in fields(layout)}


def layout_from_json(message: dict[str, Any]) -> Layout:
    tensors = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in message["tensors"])
    senders = tuple(
        tuple(Box(name, tuple(offsets), tuple(shape)) for name, offsets, shape in boxes) for boxes in message["senders"]
    )
    return Layout(**{**message, "tensors": tensors, "senders": senders})


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncHeader:
    """The header of one sync. version: rises with every sync. base_version: what a delta starts from; None = mode
    full."""

    version: int
    base_version: int | None = None
    mode: SyncMode = "full"
    layout_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """The receiver's acknowledgement: which proofs succeeded. A failed proof is a SyncError, never an Ack.

    wire: every box was received with the digest that it was sent with. read_back: the engine's parameters, read back,
    have the trainer's digests; None = the engine can't read back. num_bytes: received. num_changed: tensors whose
    digest differs from the last commit; None = no earlier commit. num_shared: tensors that are the trainer's own, so
    that nothing was sent for them; they were read back. num_changed_elements: elements that differ from the
    version before, if the senders compared them (delta). extra_bytes: memory of this sync and of the base for the next
    one, all senders together. lora_change: (projection, square); their quotient is the share of the adapters' change
    that merged weights have. seconds: of the slowest rank in each stage: "cast" (to the sampler's dtype, into the
    transfer, and the search for changes), "load" (into the target tensors), "verify" (digests), "wait" (the rest: for
    other ranks and their bytes).
    """

    version: int
    receiver: str
    wire: bool
    read_back: bool | None
    num_bytes: int
    num_tensors: int
    num_shared: int = 0
    num_changed: int | None = None
    num_changed_elements: int | None = None
    extra_bytes: int = 0
    lora_change: tuple[float, float] = (0.0, 0.0)
    seconds: dict[str, float] = field(default_factory=dict)
