"""The receiving half of a sync: the protocol that engines implement, and the state machine that they use for it.

`Receiver` is plain synchronous code: it writes transfers directly into the engine's own tensors and proves, before the
new version becomes visible, that they equal the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import torch

from meshrl.core.errors import SyncError
from meshrl.sync.delivery import ALL, Delivery, Progress, write_changes
from meshrl.sync.digest import RunningDigest, as_bytes, digests_in_threads, values
from meshrl.sync.layout import Ack, Layout, Part, SyncHeader
from meshrl.sync.reconcile import describe, reconcile
from meshrl.sync.threads import lap

_CHUNK_BYTES = 1 << 20  # digested, then copied while it is still in a core's cache

Targets = Mapping[str, torch.Tensor]
"""{name: tensor of the sent shape and dtype}, to be written in place. An alias with memory of its own is written, too;
an alias that is left out shares its source's memory."""

ReadBack = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Yields (name, parameter) for every sent name and every alias, from the tensors that the engine computes with. It may
yield one object under several names. All tensors are held until the comparison ends, so they should be views, and none
may be changed before."""


class WeightReceiver(Protocol):
    """The receiving half of a sync: idle -> begin -> receive* -> commit | cancel."""

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the engine's own parameters, both ways. Raises UnloadedParamsError."""
        ...

    async def begin(self, header: SyncHeader) -> None:
        """Close admission, flush every cache that depends on the weights, and expect this version's transfers."""
        ...

    async def receive(self, delivery: Delivery) -> None:
        """Load one transfer; its payload is not used after this returns."""
        ...

    async def commit(self) -> Ack:
        """Verify what was received, make the version visible, open admission. Raises SyncError naming what differs."""
        ...

    async def cancel(self) -> None:
        """Cancel the sync: the weights are a mixture, and unusable until the next full sync. May be called at any
        time."""
        ...


class SyncPhases:
    """idle -> begin -> open -> receive* -> commit -> idle, or cancelled until the next begin.

    Any error in a step leaves the phase cancelled: each step sets it first, and the next phase at its end. name: of the
    receiver, in errors.
    """

    def __init__(self, name: str):
        self.name = name
        self._phase: Literal["idle", "open", "cancelled"] = "idle"
        self._last = -1  # the version received last; -1 = none

    @property
    def version(self) -> int:
        """The current weight version; -1 = none, also between begin and commit and after a cancel."""
        return self._last if self._phase == "idle" else -1

    def _leave(self, step: object, *allowed: str) -> None:
        """Check that `step` is allowed now, and set the phase to cancelled until the step's end. Raises: SyncError."""
        phase, self._phase = self._phase, "cancelled"
        if phase not in allowed:
            raise SyncError(
                f"{self.name}: {step} is not allowed while the receiver is {phase}; the order is begin, receive for "
                "each transfer, then commit or cancel. A new begin starts over"
            )

    def _leave_for(self, header: SyncHeader, layout: Layout) -> None:
        """Check that this sync may begin. After a cancel the last version may be sent again, in full, as a retry.

        Raises: SyncError for another layout, a version that does not rise, or a base other than the current version.
        """
        had = self.version
        self._leave("begin", "idle", "cancelled")
        if header.layout_hash != layout.hash:
            raise SyncError(
                f"{self.name}: the header belongs to layout {header.layout_hash}, this receiver was set up for layout "
                f"{layout.hash}; reconcile again whenever names, shapes, dtypes, shards or the transfer size change"
            )
        if (header.mode != "full") != (header.base_version is not None):
            raise SyncError(
                f"{self.name}: the header has mode {header.mode!r} and base version {header.base_version}; 'full' has "
                "no base version, 'delta' and 'adapter' need one"
            )
        if header.base_version is not None and header.base_version != had:
            raise SyncError(
                f"{self.name}: a sync of mode {header.mode} needs base version {header.base_version}, but the current "
                f"version is {had} (-1 = none); send everything"
            )
        lowest = max(self._last + 1 if had >= 0 else self._last, 0)
        if header.version < lowest:
            raise SyncError(
                f"{self.name}: version {header.version} does not rise above version {self._last}, which was received "
                f"last; send {lowest} or more"
            )

    def _require_in_place(self, version: int, faults: Sequence[str], num_tensors: int, most: int | None = None) -> None:
        """faults: an error text for each tensor with other values; at most `most` are listed. Raises: SyncError."""
        if faults:
            lines = "\n".join(f"    {fault}" for fault in faults[:most])
            raise SyncError(
                f"{self.name}: version {version} is not in place; {len(faults)} of {num_tensors} tensors differ from "
                f"the trainer's:\n{lines}\nThis receiver stays unusable until the next full sync"
            )


class Receiver(SyncPhases):
    """Only a commit that verified everything makes the weights usable (`version`); else an engine raises
    StaleWeightsError.

    Consumes: transfers in order, each valid during the call. Waits for nothing, has no thread. References targets only
    while a sync is open: between syncs an engine may release or move its weights.
    """

    def __init__(self, layout: Layout, find_targets: Callable[[], Targets], name: str = "receiver"):
        """find_targets: returns the tensors, which may be other ones in each sync.

        Raises: UnloadedParamsError when targets and layout don't fit.
        """
        super().__init__(name)
        self.layout, self._find_targets = layout, find_targets
        self._bind()
        self._writes: dict[str, list[torch.Tensor]] = {}  # by sent name, while a sync is open
        self._committed: ExpectedDigests | None = None

    def targets(self) -> dict[str, torch.Tensor]:
        """By sent name, the tensors that a sender in this process may write into. Empty unless a sync is open."""
        return {name: tensors[0] for name, tensors in self._writes.items()}

    def begin(self, header: SyncHeader) -> None:
        """Open a sync. Raises: SyncError; UnloadedParamsError when the targets no longer fit the layout."""
        self._leave_for(header, self.layout)
        self._writes = self._bind()
        self._progress = Progress(self.layout, header, self.name)
        self._expected = ExpectedDigests(self.layout, header.version)
        self._phase = "open"

    def receive(self, delivery: Delivery) -> None:
        """Check one transfer's order, length and digests, and write it into the targets. Raises SyncError."""
        self._leave(delivery.transfer, "open")
        self._progress.check(delivery)
        if delivery.payload is None:
            for part in delivery.transfer.parts:
                first, *others = self._writes[part.tensor.name]
                for target in others:
                    part.of(target).copy_(part.of(first))
        else:
            self._load(delivery)
        self._expected.add(delivery.transfer.parts, delivery.digests)
        self._phase = "open"

    def _load(self, delivery: Delivery) -> None:
        """Write the transfer into the targets; compare the digests of parts that were sent in full."""
        seconds, sent = self._progress.seconds, []
        running: list[RunningDigest] = []
        for digest, (part, count, section) in zip(delivery.digests, delivery.sections(), strict=True):
            views = [part.of(target) for target in self._writes[part.tensor.name]]
            if count == ALL:
                running.append(self._write(section, views, part))
                sent.append((digest, part))
                continue
            started_at = time.perf_counter()
            for view in views:
                write_changes(part, section, count, view)
            lap(seconds, "load", started_at)
        started_at = time.perf_counter()
        for (digest, part), arrived in zip(sent, values(running), strict=True):
            self._progress.require(digest, arrived, delivery.transfer, part)
        lap(seconds, "verify", started_at)

    def _write(self, section: torch.Tensor, views: list[torch.Tensor], part: Part) -> RunningDigest:
        """Copy a part into its views. Returns the digest of the received bytes, computed while they are in a core's
        cache."""
        running, seconds = RunningDigest(self.layout.digest), self._progress.seconds
        readable, since = running.readable(section), time.perf_counter()
        in_chunks = section.device.type == "cpu" and all(view.is_contiguous() for view in views)
        raws = [as_bytes(view) for view in views] if in_chunks else []
        step = _CHUNK_BYTES if in_chunks else max(section.numel(), 1)
        for low in range(0, section.numel(), step):
            running.update(readable[low : low + step])
            since = lap(seconds, "verify", since)
            for raw in raws:
                raw[low : low + step].copy_(section[low : low + step])
            since = lap(seconds, "load", since)
        if not in_chunks:
            for view in views:
                view.copy_(section.view(view.dtype).view(part.shape))
            lap(seconds, "load", since)
        return running

    def commit(self, read_back: ReadBack | None = None) -> Ack:
        """Prove that everything was received and is in the right tensors, then raise the version.

        read_back: for the read-back proof. None = the engine can't read back; then the targets are compared with
        the trainer's digests, which still verifies cutting and joining, and the Ack has read_back None.
        Raises: SyncError naming the first incomplete tensor, or every tensor that differs.
        """
        self._leave("commit", "open")
        progress, expected, before = self._progress, self._expected, self._committed
        progress.check_complete()
        started_at = time.perf_counter()
        names = {name: name for name in self.layout.by_name} | ({} if read_back is None else self.layout.tied)
        tensors = self.targets().items() if read_back is None else read_back()
        faults = expected.differing(tensors, names, before)
        lap(progress.seconds, "verify", started_at)
        self._require_in_place(expected.version, faults, len(names))
        self._committed, self._writes = expected, {}
        self._phase, self._last = "idle", expected.version
        return Ack(
            version=expected.version,
            receiver=self.name,
            wire=True,
            read_back=None if read_back is None else True,
            num_bytes=progress.num_bytes,
            num_tensors=len(self.layout.tensors),
            num_changed=None if before is None else expected.num_changed(before),
            seconds=progress.seconds,
        )

    def cancel(self) -> None:
        """Make the weights unusable until the next full sync. May be called at any time, and repeatedly."""
        self._phase, self._writes = "cancelled", {}

    def _bind(self) -> dict[str, list[torch.Tensor]]:
        """The target tensors of each sent tensor."""
        targets = self._find_targets()
        described = describe(targets)
        reconcile(self.layout, described, {a: source for a, source in self.layout.tied.items() if a not in described})
        writes = {name: [targets[name]] for name in self.layout.by_name}
        for alias, source in self.layout.tied.items():
            if alias in described and targets[alias].data_ptr() != targets[source].data_ptr():
                writes[source].append(targets[alias])
        for name, target in targets.items():
            last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride()))
            end = (target.storage_offset() + last + 1) * target.element_size() if target.numel() else 0
            if target.untyped_storage().nbytes() < end:
                raise SyncError(f"{self.name}: the tensor to write {name} into has no memory (released?)")
        return writes


_Key = tuple[str, int]  # of a tensor that was read back: the name sent for it, and its id


class ExpectedDigests:
    """The trainer's digests of one version, for each part of each tensor."""

    def __init__(self, layout: Layout, version: int):
        self.version = version
        self._layout = layout
        self._parts: dict[str, list[Part]] = {name: [] for name in layout.by_name}
        self._digests: dict[str, list[int]] = {name: [] for name in layout.by_name}

    def add(self, parts: Iterable[Part], digests: Iterable[int]) -> None:
        """Add the digests of a transfer's parts."""
        for part, digest in zip(parts, digests, strict=True):
            self._parts[part.tensor.name].append(part)
            self._digests[part.tensor.name].append(digest)

    def num_changed(self, before: ExpectedDigests) -> int:
        """The number of tensors whose digests differ from `before`."""
        return sum(digests != before._digests[name] for name, digests in self._digests.items())

    def differing(
        self, tensors: Iterable[tuple[str, torch.Tensor]], names: Mapping[str, str], before: ExpectedDigests | None
    ) -> list[str]:
        """Compare everything read back with the trainer's digests. names: {name to be read back: name sent for it}.
        before: of the last committed sync. Returns an error text for each tensor that differs, with the tensor or
        version whose values it has, if known."""
        left, faults, fitting = dict(names), [], {}
        for name, tensor in tensors:
            source = left.pop(name, None)
            if source is None:
                problem = "twice" if name in names else "though nothing of that name was sent"
                faults.append(f"{name} was read back {problem}")
                continue
            sent = self._layout.by_name[source]
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if (shape, dtype) != (sent.shape, sent.dtype):
                faults.append(f"{name} is {list(shape)} {dtype}, sent as {list(sent.shape)} {sent.dtype}")
            else:
                fitting[name] = source, tensor
        # One object under two names (tied) is digested once.
        work = {(source, id(tensor)): (tensor, self._parts[source]) for source, tensor in fitting.values()}
        digests = self._part_digests(work)
        for name, (source, tensor) in fitting.items():
            received = digests[source, id(tensor)]
            if received != self._digests[source]:
                tie = "" if name == source else f" (tied to {source})"
                faults.append(f"{name}{tie} {self._explain(source, received, before)}")
        return faults + [f"{name} was not read back" for name in left]

    def _part_digests(self, work: Mapping[_Key, tuple[torch.Tensor, Sequence[Part]]]) -> dict[_Key, list[int]]:
        """The digest of each part of each tensor."""

        def digest(each: tuple[torch.Tensor, Part]) -> RunningDigest:
            full, part = each
            running = RunningDigest(self._layout.digest)
            running.update(running.readable(as_bytes(part.of(full).contiguous())))
            return running

        flat = [(tensor, part) for tensor, parts in work.values() for part in parts]
        sizes = [part.num_bytes for _, part in flat]
        computed = iter(digests_in_threads(self._layout.digest, digest, flat, sizes))
        return {key: [next(computed) for _ in parts] for key, (_, parts) in work.items()}

    def _explain(self, name: str, received: list[int], before: ExpectedDigests | None) -> str:
        """A description of the wrong values, for the error."""
        if before is not None and before._digests[name] == received:
            return f"still has the values of version {before.version}"
        should = self._digests[name]
        others = [each for each, digests in self._digests.items() if digests == received]
        if others:
            return f"has the values of {others[0]}"
        wrong = [number for number, (a, b) in enumerate(zip(received, should)) if a != b]
        more = f", and {len(wrong) - 1} more parts" if len(wrong) > 1 else ""
        place = "" if len(received) == 1 else f" in {self._parts[name][wrong[0]]}{more}"
        return f"has digest {received[wrong[0]]:016x}, the trainer's is {should[wrong[0]]:016x}{place}"
