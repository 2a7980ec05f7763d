"""One transfer with its bytes and digests: a sender fills it, a transport carries it, a receiver checks it. And the
protocol of transports, which carry the transfers of a sync between ranks."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import bits_of, digest_bytes, lap
from meshrl.sync.layout import Layout, Part, SyncHeader, Transfer, aligned

ALL = -1  # in Delivery.counts: the part is sent in full
NUM_SLOTS = 2  # for each sender: one is filled while the other is read
_INDEX_BYTES = 4  # the index of a changed element is an int32, counted from the part's first element
_HEAD = struct.Struct("<3Q")  # of the facts: number of the transfer, length of the payload, digest of the payload


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAddress:
    """A slot of memory of this machine: what another process needs to open it (`shared_memory.open_slots`). at: the
    payload's first byte. handles: of `shared_memory.DeviceMemory`; none for host memory."""

    ring: str
    num_slots: int
    slot_bytes: int
    slot: int
    at: int = 0
    handles: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """payload: uint8[N], valid until the receiver has read it; None = a sender in this process has written directly
    into the receiver's tensors. For each part it contains all elements, or the changed elements and then their
    indices. A part starts at a multiple of 16 bytes, its indices at a multiple of 4.

    digests: one for each part, of the part's final bytes in the target tensor.
    counts: one for each part, its number of changed elements; ALL = it is sent in full.
    payload_digest: of a payload with changed elements; 0 for others, which `digests` verify.
    slot_address: the shared-memory slot of the payload, for an engine whose weights are in another process.
    """

    transfer: Transfer
    payload: torch.Tensor | None
    digests: tuple[int, ...]
    counts: tuple[int, ...]
    payload_digest: int = 0
    slot_address: SlotAddress | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that were sent or, without a payload, written."""
        if self.payload is not None:
            return self.payload.numel()
        return sum(part.num_bytes for part, count in zip(self.transfer.parts, self.counts) if count == ALL)

    def sections(self) -> Iterator[tuple[Part, int, torch.Tensor]]:
        """For each part: the part, its number of changed elements (ALL = sent in full), and its bytes."""
        assert self.payload is not None
        at = 0
        for part, count in zip(self.transfer.parts, self.counts):
            section = self.payload[at : at + section_bytes(part, count)]
            at += aligned(section.numel())
            yield part, count, section

    def facts(self) -> bytes:
        """Everything except the payload, for a transport; `delivery_from_facts` reads it."""
        head = _HEAD.pack(self.transfer.number, self.num_bytes, self.payload_digest)
        return head + _numbers(self.transfer).pack(*self.digests, *self.counts)


def facts_bytes(transfer: Transfer) -> int:
    """The length of the facts of any delivery of this transfer."""
    return _HEAD.size + _numbers(transfer).size


def _numbers(transfer: Transfer) -> struct.Struct:
    """The digests and the counts."""
    return struct.Struct(f"<{len(transfer.parts)}Q{len(transfer.parts)}q")


def delivery_from_facts(
    transfer: Transfer,
    facts: bytes | bytearray | memoryview,
    slot: torch.Tensor,
    slot_address: SlotAddress | None = None,
) -> Delivery:
    """slot: has the payload, or gets it afterwards."""
    number, num_bytes, payload_digest = _HEAD.unpack_from(facts)
    if number != transfer.number or num_bytes > slot.numel():
        raise SyncError(f"{transfer} was expected; transfer {number} with {num_bytes} bytes was received")
    numbers = _numbers(transfer).unpack_from(facts, _HEAD.size)
    return Delivery(
        transfer=transfer,
        payload=slot[:num_bytes],
        digests=numbers[: len(transfer.parts)],
        counts=numbers[len(transfer.parts) :],
        payload_digest=payload_digest,
        slot_address=slot_address,
    )


def delivery_to_json(delivery: Delivery, slot_address: SlotAddress) -> dict[str, Any]:
    """A transfer in shared memory as JSON; its facts as text, because a JSON reader may round large numbers."""
    return {"number": delivery.transfer.number, "facts": delivery.facts().hex(), **asdict(slot_address)}


def delivery_from_json(
    layout: Layout, message: dict[str, Any], open_slots: Callable[[SlotAddress], list[torch.Tensor]]
) -> Delivery:
    """The transfer of a message of `delivery_to_json`."""
    transfers, number = layout.transfers, message["number"]
    if not 0 <= number < len(transfers):
        raise SyncError(f"transfer {number} was received; the layout has {len(transfers)}")
    places = {field.name: message[field.name] for field in fields(SlotAddress)}
    address = SlotAddress(**{**places, "handles": tuple(places["handles"])})
    slot = open_slots(address)[address.slot][address.at :]
    return delivery_from_facts(transfers[number], bytes.fromhex(message["facts"]), slot)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """How receivers reach a sender. ring: its shared memory, for receivers on the same machine. for_groups: the senders
    of its replica need it, too."""

    host: str
    port: int
    token: str = ""
    ring: str = ""
    machine: int = 0
    for_groups: bool = False


class Transport(Protocol):
    """One rank's end of all its connections. All ranks handle the layout's transfers in the same order, so they can't
    deadlock: for each window a sender calls `buffer`, all call `exchange`, and a receiver calls `release_slot` for each
    transfer of the others.

    Every wait ends when its task is cancelled; `disconnect` then ends the waits of other ranks.
    double_buffered: whether the next window may be exchanged before this one's transfers are released. num_bytes:
    memory of this rank's slots.
    """

    double_buffered: bool = False
    num_bytes: int = 0

    def prepare(self, connection_id: str) -> Address | None:
        """The address of this rank for the receivers of the next sync; None = it does not send, or needs no address.
        connection_id: as in SyncOrder."""
        ...

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Connect to the other ranks of the sync. Arguments: as in SyncOrder. Raises: SyncError."""
        ...

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        """The slot for a transfer of this rank, as soon as its previous content may be replaced. Raises: SyncError."""
        ...

    async def exchange(self, window: Sequence[Transfer], filled: Delivery | None, receives: bool) -> list[Delivery]:
        """Send the transfer of a window that is in this rank's slot, if it has one, and get those of the others, if it
        receives; they are valid until `release_slot`. Raises: SyncError."""
        ...

    async def release_slot(self, delivery: Delivery) -> None:
        """Let its sender know that this rank has read a transfer."""
        return

    def disconnect(self) -> None:
        """Close all connections, which ends all waits at their other ends."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class Progress:
    """Checks that all transfers of one sync are received, in the layout's order and as they were sent."""

    def __init__(self, layout: Layout, header: SyncHeader, name: str, shared: frozenset[str] = frozenset()):
        """name: of the receiver, in errors. shared: names of its tensors that are the trainer's own."""
        self.layout, self.header, self.name, self.shared = layout, header, name, shared
        self.num_bytes = 0
        self.seconds = {"load": 0.0, "verify": 0.0}
        self._next = 0

    def check(self, delivery: Delivery) -> None:
        """Raises: SyncError for a transfer that is not the next one, or a payload of another kind, length or digest.
        The digests of full parts are checked when their bytes are copied."""
        transfers, transfer = self.layout.transfers, delivery.transfer
        expected = transfers[self._next] if self._next < len(transfers) else None
        if transfer != expected:
            more = expected or "no more"
            raise SyncError(f"{self.name}: {transfer} was received; expected {more} of {len(transfers)}")
        parts, counts, payload = transfer.parts, delivery.counts, delivery.payload
        if not len(delivery.digests) == len(counts) == len(parts):
            numbers = [len(delivery.digests), len(counts)]
            raise SyncError(f"{self.name}: {transfer} has {numbers} digests and counts for {len(parts)} parts")
        for part, count in zip(parts, counts):
            if count and part.tensor.name in self.shared:
                raise SyncError(f"{self.name}: {transfer} has values for {part}, which is the trainer's own tensor")
            if count != ALL and self.header.mode == "full" and part.tensor.name not in self.shared:
                raise SyncError(f"{self.name}: {transfer} carries changes in a sync of everything")
        sizes = [section_bytes(part, count) for part, count in zip(parts, counts)]
        for part, count, size in zip(parts, counts, sizes):
            if count < ALL or size > part.num_bytes:
                raise SyncError(f"{self.name}: {transfer} states that the changes of {part} are longer than the part")
        if payload is not None:
            length = min(transfer.num_bytes, sum(map(aligned, sizes)))
            if payload.dtype != torch.uint8 or payload.shape != (length,):
                raise SyncError(
                    f"{self.name}: {transfer} has {list(payload.shape)} {payload.dtype}, expected [{length}] "
                    "torch.uint8"
                )
            if max(counts) > 0:
                started_at = time.perf_counter()
                arrived = digest_bytes(self.layout.digest, payload)
                lap(self.seconds, "verify", started_at)
                self.require(delivery.payload_digest, arrived, transfer)
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

    def require(self, sent: int, arrived: int, *places: Transfer | Part) -> None:
        """Raises: SyncError when bytes were received with another digest than they were sent with."""
        if arrived != sent:
            place = ": ".join(map(str, places))
            raise SyncError(f"{self.name}: {place} was sent with digest {sent:016x}, received with {arrived:016x}")
