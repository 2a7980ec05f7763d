"""The receiving half of a sync: the protocol, the name check before a run, and the state machine inside every engine.

`ReceiverState` is plain synchronous code that an engine composes: it writes buckets straight into the engine's own
tensors and proves, before the new version becomes visible, that they hold what the trainer has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from meshrl.core.errors import SyncError, UnloadedParamsError
from meshrl.core.lookup import similar_names
from meshrl.sync.digest import RunningDigest, as_bytes, digest_range
from meshrl.sync.expected import Expected
from meshrl.sync.manifest import DTYPE_BYTES, Ack, Layout, Piece, Stream, SyncHeader, aligned
from meshrl.sync.order import Order, carries

_SHOWN = 8  # names listed of each kind of fault; the rest is counted
_CHUNK_BYTES = 1 << 20  # digested and copied at once, while a core's cache holds it

ReadBack = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Yields (wire name, parameter) for every sent name and every alias, from what the engine computes with. It may yield
one object under several names; a copy is an object of its own, and stays as it is until the comparison ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A slot of a SharedRing of this machine: all that a process needs to open it (`transport.SharedRingView`)."""

    ring: str
    num_slots: int
    slot_bytes: int
    slot: int


WHOLE = -1  # in Bucket.changes: the piece itself
_PLACE_BYTES = 4  # of the place of one changed element: int32, counted from the piece's first


@dataclass(kw_only=True, slots=True)
class Bucket:
    """Bytes [index * bucket_bytes, ...) of a stream. payload: uint8[N], valid until `receive` returns.

    digest: of these bytes at their place in the stream, `digest(payload, start=index * bucket_bytes)`.
    pieces: where the header has no digests, one for each of the stream's pieces in this bucket, of the bytes that the
    piece then has, at their place in the tensor. They take the place of `digest`, unless the bucket is a delta.
    changes: of a delta, how many elements of each piece are other ones (WHOLE = the piece follows itself). For each
    piece, from a multiple of 16 bytes on: the new elements, then from a multiple of 4 on their places. `digest` is
    that of the payload by itself.
    in_place: there is no payload: a sender in this process has written the receiver's own tensors, and `pieces` is of
    what lies there; of changes alone, it has written those that are WHOLE, and left the others as they were.
    place: the slot of shared memory that the payload lies in, for an engine whose weights are in yet another process.
    """

    index: int
    payload: torch.Tensor
    digest: int
    stream: int = 0
    pieces: tuple[int, ...] | None = None
    changes: tuple[int, ...] | None = None
    in_place: bool = False
    place: Place | None = None


class WeightReceiver(Protocol):
    """The receiving half of a sync: idle -> begin -> receive* -> commit | cancel."""

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the engine's own parameters, both ways. Raises UnloadedParamsError."""
        ...

    async def begin(self, header: SyncHeader) -> None:
        """Close admission, flush every cache that depends on weights (P17), and expect this version's buckets."""
        ...

    async def receive(self, bucket: Bucket) -> None:
        """Take one bucket; its payload is read before this returns."""
        ...

    async def commit(self) -> Ack:
        """Prove what arrived, make the version visible, open admission. Raises SyncError naming what differs."""
        ...

    async def cancel(self) -> None:
        """Give up: the weights are a mixture, nothing is generated before the next full sync. May come at any time."""
        ...


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same width, in the same memory."""
    return tensor.view(_BITS[tensor.element_size()])


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype name)}: what `reconcile` compares, and what `make_layout` takes."""
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def reconcile(
    layout: Layout, own: Mapping[str, tuple[tuple[int, ...], str]], tied: Mapping[str, str] | None = None
) -> None:
    """Compare what will be sent with what the receiver has, both ways, before anything runs (P16).

    own: the receiver's parameters under their wire names: (shape, dtype). tied: its aliases -> the parameter whose
    memory they share; an alias may stand in `own` too.
    Raises: UnloadedParamsError with every fault: names never sent, names unknown to the receiver, other shapes or
    dtypes, weights that the receiver ties and the trainer does not.
    """
    tied = tied or {}
    sent = {entry.name: entry for entry in layout.entries}
    wire = {name: name for name in sent} | layout.tied  # every name the sync speaks for -> the name sent for it
    unsent, misfits, bound = [], [], []
    for name in [*own, *(alias for alias in tied if alias not in own)]:
        shape_dtype = own.get(name) or own.get(tied.get(name, ""))
        entry = sent.get(wire.get(name, ""))
        if entry is None and wire.get(tied.get(name, "")) is None:
            unsent.append(f"{name} {_spec(shape_dtype)}{_nearest(name, wire)}")
        elif entry is not None and shape_dtype is not None and shape_dtype != (entry.shape, entry.dtype):
            misfits.append(f"{name}: sent {_spec((entry.shape, entry.dtype))}, the receiver has {_spec(shape_dtype)}")
        if name in tied and wire.get(name) and wire.get(tied[name]) and wire[name] != wire[tied[name]]:
            bound.append(f"{name}, which shares the memory of {tied[name]}")
    unknown = [
        f"{name} {_spec((sent[source].shape, sent[source].dtype))}{_nearest(name, own)}"
        for name, source in wire.items()
        if name not in own and name not in tied
    ]
    faults = [
        ("never sent; the receiver would keep its own values", unsent),
        ("sent, but the receiver has no such parameter", unknown),
        ("sent with another shape or dtype", misfits),
        ("tied in the receiver, but sent as two tensors", bound),
    ]
    if any(names for _, names in faults):
        raise UnloadedParamsError(
            f"trainer and receiver disagree on {sum(len(names) for _, names in faults)} of their parameters, so "
            "nothing was sent:\n"
            + "\n".join(f"- {what}:\n{_listed(names)}" for what, names in faults if names)
            + "\nBoth sides must be built from the same model folder. If they are, a name on one side only is a rule "
            "that the model family's name map lacks; a dtype is changed where the trainer casts for the wire."
        )


def _spec(shape_dtype: tuple[tuple[int, ...], str] | None) -> str:
    return "" if shape_dtype is None else f"{list(shape_dtype[0])} {shape_dtype[1]}"


def _nearest(name: str, names: Iterable[str]) -> str:
    near = similar_names(name, names, 2)
    return f" (nearest there: {', '.join(near)})" if near else ""


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return _lines(lines[:_SHOWN] + more)


def _lines(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


class ReceiverState:
    """idle -> begin -> open -> receive* -> commit -> idle, or cancelled until the next begin.

    Whatever fails in begin, receive or commit leaves the state cancelled: a method marks it so before it starts and
    takes the mark away at its end. Only a commit that proved everything makes the weights usable.

    Consumes: buckets, those of one stream in order, each valid during the call. Waits for nothing, owns no thread.
    """

    def __init__(self, layout: Layout, targets: Mapping[str, torch.Tensor], name: str = "receiver"):
        """targets: {wire name: contiguous tensor of that shape and dtype}, written in place; an alias that has
        memory of its own is written too, one that is left out is taken to share its source's memory.

        Raises: UnloadedParamsError when targets and layout don't fit.
        """
        self.layout, self.name = layout, name
        self._targets = targets
        self._phase: Literal["idle", "open", "cancelled"] = "idle"
        self._committed: Expected | None = None
        self._expected: Expected | None = None
        self._order = Order(layout, name)
        self._num_bytes = 0
        self._seconds = {"load": 0.0, "verify": 0.0}
        self._writes = self._bind()

    @property
    def usable(self) -> bool:
        """Whether the weights are exactly those of `version`; an engine raises StaleWeightsError when not."""
        return self._phase == "idle" and self._committed is not None

    @property
    def version(self) -> int:
        """The weight version in place; -1 while there is none, also between begin and commit and after cancel."""
        return self._committed.version if self._committed is not None and self.usable else -1

    def begin(self, header: SyncHeader) -> None:
        """Open a sync. Raises: as `check_header`."""
        had, last = self.version, self._committed.version if self._committed else -1
        self._leave("begin", "idle", "cancelled")
        check_header(self.name, header, self.layout, had, last)
        self._writes = self._bind()
        self._expected = Expected(self.layout, header)
        self._order, self._num_bytes = Order(self.layout, self.name), 0
        self._seconds = {"load": 0.0, "verify": 0.0}
        self._phase = "open"

    def receive(self, bucket: Bucket) -> None:
        """Check one bucket's place, length and digests, and write it into the targets. Raises SyncError."""
        self._leave(f"bucket {bucket.index}", "open")
        expected = self._expected
        assert expected is not None
        stream = self._order.stream_of(bucket.stream, bucket.index)
        pieces = list(stream.pieces(bucket.index))
        header = expected.header
        check_payload(self.name, bucket, stream, pieces, header.mode != "full", header.digests is None)
        if bucket.pieces is None or (bucket.changes is not None and not bucket.in_place):
            began = time.perf_counter()
            start = 0 if bucket.changes is not None else stream.bucket_range(bucket.index)[0]
            arrived = digest_range(self.layout.digest, bucket.payload, start)
            self._seconds["verify"] += time.perf_counter() - began
            if arrived != bucket.digest:
                raise SyncError(
                    f"{self.name}: bucket {bucket.index} was sent with digest {bucket.digest:016x} and arrived with "
                    f"{arrived:016x}; it carries {carries(pieces)}"
                )
        self._load(bucket, pieces)
        if bucket.pieces is not None:
            expected.add(pieces, bucket.pieces)
        self._num_bytes += _written_bytes(bucket, pieces) if bucket.in_place else bucket.payload.numel()
        self._order.taken(bucket.stream)
        self._phase = "open"

    def targets(self) -> dict[str, torch.Tensor]:
        """What a sender in this process may write itself while a sync is open, by the names that are sent."""
        return {entry.name: self._targets[entry.name] for entry in self.layout.entries}

    def _load(self, bucket: Bucket, pieces: list[Piece]) -> None:
        """Write what the bucket carries; where it carries whole pieces with digests, compare them on the way."""
        if bucket.in_place:
            for piece in pieces:
                first, *others = (as_bytes(t)[piece.start : piece.stop] for t in self._writes[piece.entry.name])
                for other in others:
                    other.copy_(first)
            return
        for number, (piece, count, section) in enumerate(sections(bucket, pieces)):
            if count != WHOLE:
                began = time.perf_counter()
                for target in self._writes[piece.entry.name]:
                    write_changes(piece, section, count, as_bytes(target)[piece.start : piece.stop])
                self._seconds["load"] += time.perf_counter() - began
                continue
            wanted = bucket.pieces[number] if bucket.pieces is not None and bucket.changes is None else None
            arrived = self._write(piece, section, check=wanted is not None)
            if wanted is not None and arrived != wanted:
                raise SyncError(
                    f"{self.name}: bucket {bucket.index} brought {piece.entry.name} with digest {arrived:016x}, sent "
                    f"was {wanted:016x} (its bytes {piece.start} to {piece.stop})"
                )

    def _write(self, piece: Piece, section: torch.Tensor, check: bool) -> int | None:
        """Copy a piece into its targets; its digest, taken of what arrived while a core's cache holds it."""
        raws = [as_bytes(target)[piece.start : piece.stop] for target in self._writes[piece.entry.name]]
        running = RunningDigest(self.layout.digest, piece.start)
        readable = running.readable(section) if check else None
        step = _CHUNK_BYTES if section.device.type == "cpu" else max(section.numel(), 1)
        for low in range(0, section.numel(), step):
            part = section[low : low + step]
            began = time.perf_counter()
            if readable is not None:
                running.update(readable[low : low + step])
            checked = time.perf_counter()
            for raw in raws:
                raw[low : low + step].copy_(part)
            self._seconds["verify"] += checked - began
            self._seconds["load"] += time.perf_counter() - checked
        return running.value if check else None

    def commit(self, read_back: ReadBack | None = None) -> Ack:
        """Prove that everything arrived and is in place, then raise the version.

        read_back: the resident proof (P15). None = the engine can't; then the targets themselves are compared with
        the trainer's digests, which still vouches for cutting and putting together, and the Ack says resident None.
        Raises: SyncError naming the first incomplete tensor, or every tensor that differs.
        """
        self._leave("commit", "open")
        expected = self._expected
        assert expected is not None
        self._order.check_complete()
        began = time.perf_counter()
        if read_back is None:
            own = {entry.name: self._targets[entry.name] for entry in self.layout.entries}
            expected.compare(own.items(), {name: name for name in own}, self.name, self._committed)
        else:
            expected.compare(read_back(), self._resident_names(), self.name, self._committed)
        self._seconds["verify"] += time.perf_counter() - began
        num_changed = None if self._committed is None else expected.num_changed(self._committed)
        self._committed, self._expected = expected, None
        self._phase = "idle"
        return Ack(
            version=expected.version,
            receiver=self.name,
            wire=True,
            resident=None if read_back is None else True,
            num_bytes=self._num_bytes,
            num_tensors=len(self.layout.entries),
            num_changed=num_changed,
            seconds=dict(self._seconds),
        )

    def cancel(self) -> None:
        """Make the weights unusable until the next full sync. May be called at any time, more than once."""
        self._phase = "cancelled"

    def _leave(self, step: str, *allowed: str) -> None:
        """Check that `step` may come now, and mark the state cancelled until the step's end."""
        phase, self._phase = self._phase, "cancelled"
        if phase not in allowed:
            raise SyncError(
                f"{self.name}: {step} came while the receiver was {phase}; the order is begin, receive for each "
                "bucket, then commit or cancel. A new begin starts over"
            )

    def _bind(self) -> dict[str, list[torch.Tensor]]:
        """Where each sent tensor is written. Looked up at every begin: an engine may have moved its weights."""
        held = describe(self._targets)
        reconcile(self.layout, held, {a: source for a, source in self.layout.tied.items() if a not in held})
        writes = {entry.name: [self._targets[entry.name]] for entry in self.layout.entries}
        for alias, source in self.layout.tied.items():
            if alias in held and self._targets[alias].data_ptr() != self._targets[source].data_ptr():
                writes[source].append(self._targets[alias])
        for name, target in self._targets.items():
            end = (target.storage_offset() + target.numel()) * target.element_size()
            if not target.is_contiguous() or target.untyped_storage().nbytes() < end:
                fault = "has no memory (released?)" if target.is_contiguous() else "is not contiguous"
                raise SyncError(f"{self.name}: the tensor to write {name} into {fault}; a sync writes in place")
        return writes

    def _resident_names(self) -> dict[str, str]:
        """Every name that has to be read back, aliases too, each by its own way through the engine's name map -> the
        name that was sent for it."""
        return {entry.name: entry.name for entry in self.layout.entries} | self.layout.tied


def _written_bytes(bucket: Bucket, pieces: Sequence[Piece]) -> int:
    """What a sender in this process has written itself."""
    counts = bucket.changes or [WHOLE] * len(pieces)
    return sum(piece.stop - piece.start for piece, count in zip(pieces, counts, strict=True) if count == WHOLE)


def section_bytes(piece: Piece, count: int) -> int:
    """Bytes of a piece in a delta's payload, or of the piece itself."""
    if count == WHOLE:
        return piece.stop - piece.start
    return places_at(piece, count) + count * _PLACE_BYTES


def places_at(piece: Piece, count: int) -> int:
    """Byte of the section at which the places begin."""
    return -(-count * DTYPE_BYTES[piece.entry.dtype] // _PLACE_BYTES) * _PLACE_BYTES


def sections(bucket: Bucket, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, torch.Tensor]]:
    """Each piece, how many of its elements are other ones (WHOLE = it comes itself), and what the payload has of it."""
    at = 0
    for number, piece in enumerate(pieces):
        count = WHOLE if bucket.changes is None else bucket.changes[number]
        at = piece.at if bucket.changes is None else at
        section = bucket.payload[at : at + section_bytes(piece, count)]
        at += aligned(section.numel())
        yield piece, count, section


def write_changes(piece: Piece, section: torch.Tensor, count: int, raw: torch.Tensor) -> None:
    """Put `count` new elements into their places among the bytes of a piece."""
    size = DTYPE_BYTES[piece.entry.dtype]
    flat = raw.view(_BITS[size])
    values = section[: count * size].view(flat.dtype)
    places = section[places_at(piece, count) :].view(torch.int32)
    flat.scatter_(0, places.to(flat.device).long(), values.to(flat.device))


def check_payload(
    name: str, bucket: Bucket, stream: Stream, pieces: Sequence[Piece], changes: bool, with_pieces: bool
) -> None:
    """Length and dtype of what a bucket carries. changes: the sync's mode is delta or adapter; with_pieces: the header
    has no digests. Raises: SyncError."""
    payload = bucket.payload
    start, stop = stream.bucket_range(bucket.index)
    wanted = 0 if bucket.in_place else stop - start
    if bucket.changes is not None:
        wanted = min(wanted, sum(aligned(section_bytes(p, n)) for p, n in zip(pieces, bucket.changes)))
    if payload.dtype != torch.uint8 or payload.shape != (wanted,):
        raise SyncError(
            f"{name}: bucket {bucket.index} has {list(payload.shape)} {payload.dtype}, expected [{wanted}] "
            f"torch.uint8; it carries {carries(pieces)}"
        )
    longer = [p.entry.name for p, n in zip(pieces, bucket.changes or ()) if section_bytes(p, n) > p.stop - p.start]
    if longer:
        raise SyncError(f"{name}: bucket {bucket.index} says that changes of {longer[0]} are longer than itself")
    numbers = [len(each) for each in (bucket.pieces, bucket.changes) if each is not None]
    if set(numbers) - {len(pieces)} or (with_pieces and bucket.pieces is None):
        raise SyncError(
            f"{name}: bucket {bucket.index} speaks of {numbers} pieces and carries {len(pieces)}, {carries(pieces)}"
        )
    if (bucket.changes is not None) != changes:
        kind, mode = ("whole tensors", "changes alone") if changes else ("changes", "everything")
        raise SyncError(f"{name}: bucket {bucket.index} carries {kind} in a sync of {mode}")


def check_header(name: str, header: SyncHeader, layout: Layout, had: int, last: int) -> None:
    """Whether a sync may begin. had: the version in place; last: that was received last; -1 = none.

    After a cancel the last version may come again, in full: that is a retry.

    Raises: SyncError for another layout, a version that does not rise, a base that isn't in place.
    """
    if header.layout_hash != layout.hash:
        raise SyncError(
            f"{name}: the header belongs to layout {header.layout_hash}, this receiver was set up for layout "
            f"{layout.hash}; reconcile again whenever names, shapes, dtypes or the bucket size change"
        )
    if (header.mode != "full") != (header.base_version is not None):
        raise SyncError(
            f"{name}: mode {header.mode!r} on base version {header.base_version} was asked for; 'full' has no base "
            "version, 'delta' and 'adapter' need one"
        )
    if header.base_version is not None and header.base_version != had:
        raise SyncError(
            f"{name}: a sync of mode {header.mode} on base version {header.base_version} came, but version {had} is in "
            "place (-1 = none); send everything"
        )
    lowest = max(last + 1 if had >= 0 else last, 0)
    if header.version < lowest:
        raise SyncError(
            f"{name}: version {header.version} does not rise above version {last}, which was received last; send "
            f"{lowest} or more"
        )
    if header.digests is not None and header.digests.keys() != {entry.name for entry in layout.entries}:
        odd = sorted(header.digests.keys() ^ {entry.name for entry in layout.entries})
        raise SyncError(f"{name}: digests and layout name different tensors: {', '.join(odd[:_SHOWN])}")
