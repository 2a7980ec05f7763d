"""The receiving half of a sync: the protocol, the name check before a run, and the state machine inside every engine.

`ReceiverState` is plain synchronous code that an engine composes: it writes buckets straight into the engine's own
tensors and proves, before the new version becomes visible, that they hold what the trainer has.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from meshrl.core.errors import SyncError, UnloadedParamsError
from meshrl.sync.digest import as_bytes, digest
from meshrl.sync.manifest import Ack, Entry, Layout, SyncHeader

_SHOWN = 8  # names listed of each kind of fault; the rest is counted

ReadBack = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Yields (wire name, parameter) for every sent name and every alias, from what the engine computes with."""


@dataclass(kw_only=True, slots=True)
class Bucket:
    """One piece of the stream: bytes [index * bucket_bytes, ...). payload: uint8[N], valid until `receive` returns.

    digest: of these bytes at their place in the stream, `digest(payload, start=index * bucket_bytes)`.
    """

    index: int
    payload: torch.Tensor
    digest: int


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
    near = difflib.get_close_matches(name, list(names), n=2, cutoff=0.5)
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

    Consumes: buckets in order, each valid during the call. Waits for nothing, starts no task, owns no thread.
    """

    def __init__(self, layout: Layout, targets: Mapping[str, torch.Tensor], name: str = "receiver"):
        """targets: {wire name: contiguous tensor of that shape and dtype}, written in place; an alias that has
        memory of its own is written too, one that is left out is taken to share its source's memory.

        Raises: UnloadedParamsError when targets and layout don't fit.
        """
        self.layout, self.name = layout, name
        self._targets = targets
        self._hash = layout.hash
        self._phase: Literal["idle", "open", "cancelled"] = "idle"
        self._committed: SyncHeader | None = None
        self._header: SyncHeader | None = None
        self._next = 0
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
        """Open a sync. Raises SyncError for another layout, a version that does not rise, a mode other than full.

        After a cancel the last version may come again: that is a retry.
        """
        was_usable = self.usable
        self._leave("begin", "idle", "cancelled")
        if header.layout_hash != self._hash:
            raise SyncError(
                f"{self.name}: the header belongs to layout {header.layout_hash}, this receiver was set up for layout "
                f"{self._hash}; reconcile again whenever names, shapes, dtypes or the bucket size change"
            )
        if header.mode != "full" or header.base_version is not None:
            raise SyncError(
                f"{self.name}: mode {header.mode!r} on base version {header.base_version} was asked for; this receiver "
                "takes mode 'full' without a base version"
            )
        last = self._committed.version if self._committed else -1
        lowest = max(last + 1 if was_usable else last, 0)
        if header.version < lowest:
            raise SyncError(
                f"{self.name}: version {header.version} does not rise above version {last}, which was received last; "
                f"send {lowest} or more"
            )
        if header.digests.keys() != {entry.name for entry in self.layout.entries}:
            odd = sorted(header.digests.keys() ^ {entry.name for entry in self.layout.entries})
            raise SyncError(f"{self.name}: digests and layout name different tensors: {', '.join(odd[:_SHOWN])}")
        self._writes = self._bind()
        self._header, self._next = header, 0
        self._seconds = {"load": 0.0, "verify": 0.0}
        self._phase = "open"

    def receive(self, bucket: Bucket) -> None:
        """Check one bucket's place, length and digest, then write it into the targets. Raises SyncError."""
        self._leave(f"bucket {bucket.index}", "open")
        layout = self.layout
        if bucket.index != self._next or bucket.index >= layout.num_buckets:
            left = self._next < layout.num_buckets
            wanted = f"bucket {self._next} ({self._carries(self._next)})" if left else "no more"
            what = "came twice" if 0 <= bucket.index < self._next else "came out of order"
            raise SyncError(f"{self.name}: bucket {bucket.index} {what}; expected {wanted} of {layout.num_buckets}")
        start, stop = layout.bucket_range(bucket.index)
        payload = bucket.payload
        if payload.dtype != torch.uint8 or payload.shape != (stop - start,):
            raise SyncError(
                f"{self.name}: bucket {bucket.index} has {list(payload.shape)} {payload.dtype}, expected "
                f"[{stop - start}] torch.uint8; it carries {self._carries(bucket.index)}"
            )
        began = time.perf_counter()
        arrived = digest(payload, start)
        checked = time.perf_counter()
        if arrived != bucket.digest:
            raise SyncError(
                f"{self.name}: bucket {bucket.index} was sent with digest {bucket.digest:016x} and arrived with "
                f"{arrived:016x}; it carries {self._carries(bucket.index)}"
            )
        for piece in layout.pieces(bucket.index):
            source = payload[piece.at : piece.at + piece.stop - piece.start]
            for target in self._writes[piece.entry.name]:
                as_bytes(target)[piece.start : piece.stop].copy_(source)
        self._seconds["verify"] += checked - began
        self._seconds["load"] += time.perf_counter() - checked
        self._next += 1
        self._phase = "open"

    def commit(self, read_back: ReadBack | None = None) -> Ack:
        """Prove that everything arrived and is in place, then raise the version.

        read_back: the resident proof (P15). None = the engine can't; then the targets themselves are compared with
        the header, which still vouches for gathering, cutting and putting together, and the Ack says resident None.
        Raises: SyncError naming the first incomplete tensor, or every tensor that differs.
        """
        self._leave("commit", "open")
        header = self._header
        assert header is not None
        if self._next < self.layout.num_buckets:
            first = next(self.layout.pieces(self._next)).entry.name
            raise SyncError(
                f"{self.name}: commit after {self._next} of {self.layout.num_buckets} buckets; {first} is the first "
                "tensor that is incomplete"
            )
        began = time.perf_counter()
        if read_back is None:
            own = {entry.name: self._targets[entry.name] for entry in self.layout.entries}
            self._compare(header, own.items(), {entry.name: entry for entry in self.layout.entries})
        else:
            self._compare(header, read_back(), self._resident_entries())
        self._seconds["verify"] += time.perf_counter() - began
        self._committed, self._header = header, None
        self._phase = "idle"
        return Ack(
            version=header.version,
            receiver=self.name,
            wire=True,
            resident=None if read_back is None else True,
            num_bytes=self.layout.total_bytes,
            num_tensors=len(self.layout.entries),
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

    def _carries(self, index: int) -> str:
        names = [piece.entry.name for piece in self.layout.pieces(index)]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def _resident_entries(self) -> dict[str, Entry]:
        """Every name that has to be read back, aliases too, each by its own way through the engine's name map."""
        sent = {entry.name: entry for entry in self.layout.entries}
        return sent | {alias: sent[source] for alias, source in self.layout.tied.items()}

    def _compare(
        self, header: SyncHeader, found: Iterable[tuple[str, torch.Tensor]], expected: dict[str, Entry]
    ) -> None:
        """Compare every expected tensor with its digest in the header. Raises SyncError naming all that differ."""
        faults, left = [], dict(expected)
        for name, tensor in found:
            entry = left.pop(name, None)
            if entry is None:
                why = "twice" if name in expected else "though nothing of that name was sent"
                faults.append(f"{name} was read back {why}")
                continue
            held, wanted = describe({name: tensor})[name], (entry.shape, entry.dtype)
            if held != wanted:
                faults.append(f"{name} is {_spec(held)}, sent as {_spec(wanted)}")
                continue
            value = digest(tensor)
            if value != header.digests[entry.name]:
                tie = "" if name == entry.name else f" (tied to {entry.name})"
                faults.append(f"{name}{tie} {self._explain(header, entry.name, value)}")
        faults += [f"{name} was not read back" for name in left]
        if faults:
            raise SyncError(
                f"{self.name}: version {header.version} is not in place; {len(faults)} of {len(expected)} tensors "
                f"differ from the trainer's:\n{_lines(faults)}\nThis receiver stays unusable until the next full sync"
            )

    def _explain(self, header: SyncHeader, name: str, value: int) -> str:
        """What the wrong values are, where their digest is known."""
        if self._committed is not None and self._committed.digests[name] == value:
            return f"still has the values of version {self._committed.version}"
        others = [other for other, theirs in header.digests.items() if theirs == value]
        if others:
            return f"has the values of {others[0]}"
        return f"has digest {value:016x}, the trainer's is {header.digests[name]:016x}"
