"""One transfer with its bytes and digests: what a sender fills, a transport carries, and a receiver loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import bits_of
from meshrl.sync.layout import Layout, Part, Transfer, aligned

ALL = -1  # in Delivery.counts: the part is there in full
_PLACE_BYTES = 4  # of the place of one changed element: int32, counted from the part's first


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A slot of a SharedRing of this machine: all that a process needs to open it (`shared_memory.SharedRingView`)."""

    ring: str
    num_slots: int
    slot_bytes: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """payload: uint8[N], valid until the receiver has taken it; None = a sender in this process has written the
    receiver's own tensors.

    digests: one for each part, of the bytes that the part has when it is in place.
    counts: of a delta, the number of changed elements of each part (ALL = the part is there in full). For each part,
    from a multiple of 16 bytes on: the new elements, then from a multiple of 4 on their places. payload_digest is then
    that of the payload itself.
    place: the slot of shared memory that the payload lies in, for an engine whose weights are in yet another process.
    """

    transfer: Transfer
    payload: torch.Tensor | None
    digests: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    payload_digest: int = 0
    place: Place | None = None

    @property
    def num_bytes(self) -> int:
        """That were sent or, without a payload, written."""
        if self.payload is not None:
            return self.payload.numel()
        counts = self.counts or [ALL] * len(self.digests)
        return sum(part.num_bytes for part, count in zip(self.transfer.parts, counts, strict=True) if count == ALL)

    def sections(self) -> Iterator[tuple[Part, int, torch.Tensor]]:
        """Each part, how many of its elements are changed (ALL = all of them are there), and its bytes."""
        assert self.payload is not None
        at = 0
        for number, part in enumerate(self.transfer.parts):
            count = ALL if self.counts is None else self.counts[number]
            at = part.at if self.counts is None else at
            section = self.payload[at : at + section_bytes(part, count)]
            at += aligned(section.numel())
            yield part, count, section

    def check(self, name: str, changes: bool) -> None:
        """Length and kind of what is there. name: of the receiver; changes: the sync's mode is delta or adapter.
        Raises: SyncError."""
        transfer, parts = self.transfer, self.transfer.parts
        numbers = [len(each) for each in (self.digests, self.counts) if each is not None]
        if set(numbers) != {len(parts)}:
            raise SyncError(f"{name}: {transfer} has {numbers} digests and counts for {len(parts)} parts")
        if (self.counts is not None) != changes:
            kind, mode = ("full tensors", "changes") if changes else ("changes", "everything")
            raise SyncError(f"{name}: {transfer} carries {kind} in a sync of {mode}")
        longer = [p for p, n in zip(parts, self.counts or ()) if n < ALL or section_bytes(p, n) > p.num_bytes]
        if longer:
            raise SyncError(f"{name}: {transfer} states that the changes of {longer[0]} are longer than itself")
        if self.payload is None:
            return
        wanted = transfer.num_bytes
        if self.counts is not None:
            wanted = min(wanted, sum(aligned(section_bytes(p, n)) for p, n in zip(parts, self.counts)))
        if self.payload.dtype != torch.uint8 or self.payload.shape != (wanted,):
            raise SyncError(
                f"{name}: {transfer} has {list(self.payload.shape)} {self.payload.dtype}, expected [{wanted}] "
                "torch.uint8"
            )

    def facts(self) -> bytes:
        """Everything but the payload, for a transport; `delivery_from` reads it."""
        counts = self.counts if self.counts is not None else ()
        head = [self.transfer.number, self.num_bytes, self.payload_digest, self.counts is not None]
        return np.array([*head, *self.digests, *(count & _MASK for count in counts)], dtype=np.uint64).tobytes()


_MASK = (1 << 64) - 1
NUM_HEAD = 4  # numbers in `facts` before the digests


def delivery_from(transfer: Transfer, facts: bytes, payload: torch.Tensor, place: Place | None = None) -> Delivery:
    """payload: the slot that the bytes lie in. Raises: SyncError when the facts are of another transfer."""
    number, num_bytes, payload_digest, has_counts, *numbers = np.frombuffer(facts, dtype=np.uint64).tolist()
    count = len(transfer.parts)
    if number != transfer.number or len(numbers) != count * (1 + has_counts) or num_bytes > payload.numel():
        raise SyncError(
            f"{transfer} was expected; transfer {number} with {num_bytes} bytes and {len(numbers)} numbers was received"
        )
    counts = tuple(int(n) - (1 << 64) if n >> 63 else int(n) for n in numbers[count:])
    return Delivery(
        transfer=transfer,
        payload=payload[:num_bytes],
        digests=tuple(numbers[:count]),
        counts=counts if has_counts else None,
        payload_digest=payload_digest,
        place=place,
    )


def delivery_to(delivery: Delivery, place: Place) -> dict[str, Any]:
    """A full transfer in shared memory as JSON: digests as text, which no reader rounds."""
    return {
        "number": delivery.transfer.number,
        "digests": [f"{value:016x}" for value in delivery.digests],
        "ring": place.ring,
        "num_slots": place.num_slots,
        "slot_bytes": place.slot_bytes,
        "slot": place.slot,
    }


def delivery_read(layout: Layout, message: dict[str, Any], payload: torch.Tensor) -> Delivery:
    """The transfer of a message of `delivery_to`. payload: its slot. Raises: SyncError for a number that is none."""
    transfers, number = layout.transfers, message["number"]
    if not 0 <= number < len(transfers):
        raise SyncError(f"transfer {number} was received; the layout has {len(transfers)}")
    transfer = transfers[number]
    digests = tuple(int(text, 16) for text in message["digests"])
    return Delivery(transfer=transfer, payload=payload[: transfer.num_bytes], digests=digests)


def section_bytes(part: Part, count: int) -> int:
    """Bytes of a part in a delta's payload, or of the part itself."""
    return part.num_bytes if count == ALL else places_at(part, count) + count * _PLACE_BYTES


def places_at(part: Part, count: int) -> int:
    """Byte of the section at which the places begin."""
    return -(-count * part.tensor.torch_dtype.itemsize // _PLACE_BYTES) * _PLACE_BYTES


def write_changes(part: Part, section: torch.Tensor, count: int, target: torch.Tensor) -> None:
    """Put `count` new elements into their places in the view that the part fills."""
    if not count:
        return
    bits = bits_of(target.view(-1)) if target.is_contiguous() else bits_of(target.contiguous().view(-1))
    new = section[: count * bits.element_size()].view(bits.dtype)
    places = section[places_at(part, count) :].view(torch.int32)
    bits.scatter_(0, places.to(bits.device).long(), new.to(bits.device))
    if not target.is_contiguous():
        target.copy_(bits.view(target.dtype).view(target.shape))
