"""One transfer with its bytes and digests: a sender fills it, a transport carries it, a receiver checks it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import bits_of, digest_bytes
from meshrl.sync.layout import Layout, Part, SyncHeader, Transfer, aligned
from meshrl.sync.threads import lap

ALL = -1  # in Delivery.counts: the part is sent in full
_INDEX_BYTES = 4  # the index of a changed element is an int32, counted from the part's first element


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAddress:
    """A slot of a SharedRing of this machine: what another process needs to open it
    (`shared_memory.SharedRingView`)."""

    ring: str
    num_slots: int
    slot_bytes: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """payload: uint8[N], valid until the receiver has read it; None = a sender in this process has written directly
    into the receiver's tensors.

    digests: one for each part, of the part's final bytes in the target tensor.
    counts: in a delta, the number of changed elements of each part (ALL = the part is sent in full). The payload then
    has for each part, from a multiple of 16 bytes on, the new elements and, from a multiple of 4 on, their indices.
    payload_digest: in a delta, of the payload itself.
    slot_address: the shared-memory slot of the payload, for an engine whose weights are in another process.
    """

    transfer: Transfer
    payload: torch.Tensor | None
    digests: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    payload_digest: int = 0
    slot_address: SlotAddress | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that were sent or, without a payload, written."""
        if self.payload is not None:
            return self.payload.numel()
        return sum(part.num_bytes for part, count in self._counted() if count == ALL)

    def sections(self) -> Iterator[tuple[Part, int, torch.Tensor]]:
        """For each part: the part, its number of changed elements (ALL = sent in full), and its bytes."""
        assert self.payload is not None
        at = 0
        for part, count in self._counted():
            section = self.payload[at : at + section_bytes(part, count)]
            at += aligned(section.numel())
            yield part, count, section

    def check(self, name: str, changes: bool) -> None:
        """Check length and kind of the payload. name: of the receiver. changes: the sync's mode is delta or adapter.
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
            raise SyncError(f"{name}: {transfer} states that the changes of {longer[0]} are longer than the part")
        if self.payload is None:
            return
        wanted = transfer.num_bytes
        if self.counts is not None:
            wanted = min(wanted, sum(aligned(section_bytes(p, n)) for p, n in self._counted()))
        if self.payload.dtype != torch.uint8 or self.payload.shape != (wanted,):
            raise SyncError(
                f"{name}: {transfer} has {list(self.payload.shape)} {self.payload.dtype}, expected [{wanted}] "
                "torch.uint8"
            )

    def _counted(self) -> Iterator[tuple[Part, int]]:
        """Each part with its number of changed elements."""
        return zip(self.transfer.parts, repeat(ALL) if self.counts is None else self.counts)

    def facts(self) -> bytes:
        """Everything except the payload, for a transport; `delivery_from_facts` reads it."""
        counts = self.counts if self.counts is not None else ()
        head = [self.transfer.number, self.num_bytes, self.payload_digest, self.counts is not None]
        return np.array([*head, *self.digests, *(count & _MASK for count in counts)], dtype=np.uint64).tobytes()


_MASK = (1 << 64) - 1
NUM_HEAD = 4  # numbers in `facts` before the digests


def delivery_from_facts(
    transfer: Transfer, facts: bytes, payload: torch.Tensor, slot_address: SlotAddress | None = None
) -> Delivery:
    """payload: the slot with the bytes. Raises: SyncError when the facts are of another transfer."""
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
        slot_address=slot_address,
    )


def delivery_to_json(delivery: Delivery, slot_address: SlotAddress) -> dict[str, Any]:
    """A transfer in shared memory as JSON; its facts as text, because a JSON reader may round large numbers."""
    return {"number": delivery.transfer.number, "facts": delivery.facts().hex(), **asdict(slot_address)}


def delivery_from_json(layout: Layout, message: dict[str, Any], payload: torch.Tensor) -> Delivery:
    """The transfer of a message of `delivery_to_json`. payload: its slot. Raises: SyncError for an unknown number."""
    transfers, number = layout.transfers, message["number"]
    if not 0 <= number < len(transfers):
        raise SyncError(f"transfer {number} was received; the layout has {len(transfers)}")
    return delivery_from_facts(transfers[number], bytes.fromhex(message["facts"]), payload)


def section_bytes(part: Part, count: int) -> int:
    """Bytes of a part in a delta's payload; `count` changed elements, or ALL."""
    return part.num_bytes if count == ALL else indices_at(part, count) + count * _INDEX_BYTES


def indices_at(part: Part, count: int) -> int:
    """Byte of the section at which the indices begin."""
    return -(-count * part.tensor.torch_dtype.itemsize // _INDEX_BYTES) * _INDEX_BYTES


def pack_changes(part: Part, section: torch.Tensor, indices: torch.Tensor, new: torch.Tensor) -> None:
    """Write changed elements, then their indices, into the part's section of a payload."""
    values_end, indices_start = new.nbytes, indices_at(part, len(indices))
    section[:values_end].view(new.dtype).copy_(new)
    section[values_end:indices_start].zero_()
    section[indices_start:].view(torch.int32).copy_(indices)


def write_changes(part: Part, section: torch.Tensor, count: int, target: torch.Tensor) -> None:
    """Write `count` new elements at their indices into `target`, the part's view of a tensor."""
    if not count:
        return
    bits = bits_of(target.view(-1)) if target.is_contiguous() else bits_of(target.contiguous().view(-1))
    new = section[: count * bits.element_size()].view(bits.dtype)
    indices = section[indices_at(part, count) :].view(torch.int32)
    bits.scatter_(0, indices.to(bits.device).long(), new.to(bits.device))
    if not target.is_contiguous():
        target.copy_(bits.view(target.dtype).view(target.shape))


class Progress:
    """Checks that all transfers of one sync are received, in the layout's order and as they were sent."""

    def __init__(self, layout: Layout, header: SyncHeader, name: str):
        """name: of the receiver, in errors."""
        self.layout, self.header, self.name = layout, header, name
        self.num_bytes = 0
        self.seconds = {"load": 0.0, "verify": 0.0}
        self._next = 0

    def check(self, delivery: Delivery) -> None:
        """Raises: SyncError for a transfer that is not the next one, or a payload of another length or digest. The
        digests of full parts are checked when their bytes are copied."""
        transfers, number = self.layout.transfers, delivery.transfer.number
        if number != self._next or number >= len(transfers) or delivery.transfer != transfers[number]:
            expected = transfers[self._next] if self._next < len(transfers) else "no more"
            raise SyncError(f"{self.name}: {delivery.transfer} was received; expected {expected} of {len(transfers)}")
        delivery.check(self.name, changes=self.header.mode != "full")
        if delivery.counts is not None and delivery.payload is not None:
            began = time.perf_counter()
            arrived = digest_bytes(self.layout.digest, delivery.payload)
            lap(self.seconds, "verify", began)
            self.require(delivery.payload_digest, arrived, delivery.transfer)
        self.num_bytes += delivery.num_bytes
        self._next += 1

    def check_complete(self) -> None:
        """Raises: SyncError naming the first tensor that is incomplete."""
        transfers = self.layout.transfers
        if self._next < len(transfers):
            first = transfers[self._next].parts[0].tensor.name
            raise SyncError(
                f"{self.name}: commit after {self._next} of {len(transfers)} transfers; {first} is the first tensor "
                "that is incomplete"
            )

    def require(self, sent: int, arrived: int, *where: Transfer | Part) -> None:
        """Raises: SyncError when bytes were received with another digest than they were sent with."""
        if arrived != sent:
            what = ": ".join(map(str, where))
            raise SyncError(f"{self.name}: {what} was sent with digest {sent:016x}, received with {arrived:016x}")
