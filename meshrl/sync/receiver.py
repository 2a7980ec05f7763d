"""The receiving half of a sync: the protocol that engines implement, and the state machine that they use for it.

`Receiver` is plain synchronous code: it writes transfers directly into the engine's own tensors and proves, before the
new version becomes visible, that they equal the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol

import torch

from meshrl.core.errors import SyncError
from meshrl.sync.delivery import ALL, Delivery, write_changes
from meshrl.sync.digest import RunningDigest, as_bytes, digest_bytes
from meshrl.sync.expected import ExpectedDigests
from meshrl.sync.layout import Ack, Layout, Part, SyncHeader
from meshrl.sync.reconcile import describe, reconcile

_CHUNK_BYTES = 1 << 20  # digested, then copied while it is still in a core's cache

Targets = Mapping[str, torch.Tensor]
"""{name: tensor of the sent shape and dtype}, to be written in place. An alias with memory of its own is written, too;
an alias that is left out shares its source's memory."""

ReadBack = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Yields (name, parameter) for every sent name and every alias, from the tensors that the engine computes with. It may
yield one object under several names. A copy must be a new object, which is not changed until the comparison ends."""


class WeightReceiver(Protocol):
    """The receiving half of a sync: idle -> begin -> receive* -> commit | cancel."""

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the engine's own parameters, both ways. Raises UnloadedParamsError."""
        ...

    async def begin(self, header: SyncHeader) -> None:
        """Close admission, flush every cache that depends on the weights (P17), and expect this version's transfers."""
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


class Progress:
    """Checks that all transfers of one sync are received, in the layout's order and as they were sent."""

    def __init__(self, layout: Layout, header: SyncHeader, name: str):
        """name: of the receiver, in errors."""
        self.layout, self.header, self.name = layout, header, name
        self.num_bytes = 0
        self.verify_s = 0.0
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
            self.verify_s += time.perf_counter() - began
            if arrived != delivery.payload_digest:
                raise SyncError(
                    f"{self.name}: {delivery.transfer} was sent with digest {delivery.payload_digest:016x}, received "
                    f"with {arrived:016x}"
                )

    def loaded(self, delivery: Delivery) -> None:
        """Count a transfer that was loaded."""
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

    def require(self, delivery: Delivery, part: Part, arrived: int, sent: int) -> None:
        """Raises: SyncError when a part was received with another digest than it was sent with."""
        if arrived != sent:
            raise SyncError(
                f"{self.name}: {delivery.transfer}: {part} was sent with digest {sent:016x}, received with "
                f"{arrived:016x}"
            )


class Receiver:
    """idle -> begin -> open -> receive* -> commit -> idle, or cancelled until the next begin.

    Any error in begin, receive or commit leaves the state cancelled: each method sets the state to cancelled first and
    to the next phase at its end. Only a commit that verified everything makes the weights usable.

    Consumes: transfers in order, each valid during the call. Waits for nothing, has no thread. References targets only
    while a sync is open: between syncs an engine may release or move its weights.
    """

    def __init__(self, layout: Layout, targets: Targets | Callable[[], Targets], name: str = "receiver"):
        """targets: the tensors, or a function that returns them if they may be other tensors in the next sync.

        Raises: UnloadedParamsError when targets and layout don't fit.
        """
        self.layout, self.name = layout, name
        self._find_targets = targets if callable(targets) else lambda: targets
        self._phase: Literal["idle", "open", "cancelled"] = "idle"
        self._committed: ExpectedDigests | None = None
        self._progress: Progress | None = None
        self._expected: ExpectedDigests | None = None
        self._load_s = 0.0
        self._bind()
        self._writes: dict[str, list[torch.Tensor]] = {}

    @property
    def usable(self) -> bool:
        """Whether the weights are exactly those of `version`; an engine raises StaleWeightsError when not."""
        return self._phase == "idle" and self._committed is not None

    @property
    def version(self) -> int:
        """The current weight version; -1 = none, also between begin and commit and after cancel."""
        return self._committed.version if self._committed is not None and self.usable else -1

    def targets(self) -> dict[str, torch.Tensor]:
        """By sent name, the tensors that a sender in this process may write into while a sync is open."""
        found = self._find_targets()
        return {name: found[name] for name in self.layout.by_name}

    def begin(self, header: SyncHeader) -> None:
        """Open a sync. Raises: as `check_header`."""
        had, last = self.version, self._committed.version if self._committed else -1
        self._leave("begin", "idle", "cancelled")
        check_header(self.name, header, self.layout, had, last)
        self._writes = self._bind()
        self._progress = Progress(self.layout, header, self.name)
        self._expected = ExpectedDigests(self.layout, header.version)
        self._load_s = 0.0
        self._phase = "open"

    def receive(self, delivery: Delivery) -> None:
        """Check one transfer's order, length and digests, and write it into the targets. Raises SyncError."""
        self._leave(str(delivery.transfer), "open")
        progress, expected = self._progress, self._expected
        assert progress is not None and expected is not None
        progress.check(delivery)
        if delivery.payload is None:
            for part in delivery.transfer.parts:
                first, *others = (part.of(target) for target in self._writes[part.tensor.name])
                for other in others:
                    other.copy_(first)
        else:
            self._load(delivery, progress)
        expected.add(delivery.transfer.parts, delivery.digests)
        progress.loaded(delivery)
        self._phase = "open"

    def _load(self, delivery: Delivery, progress: Progress) -> None:
        """Write the transfer into the targets; compare the digests of full parts while they are copied."""
        for number, (part, count, section) in enumerate(delivery.sections()):
            views = [part.of(target) for target in self._writes[part.tensor.name]]
            if count == ALL:
                check = delivery.counts is None  # otherwise the payload's digest was compared
                arrived = self._write(section, views, part, progress, check)
                if check:
                    progress.require(delivery, part, arrived, delivery.digests[number])
                continue
            began = time.perf_counter()
            for view in views:
                write_changes(part, section, count, view)
            self._load_s += time.perf_counter() - began

    def _write(
        self, section: torch.Tensor, views: list[torch.Tensor], part: Part, progress: Progress, check: bool
    ) -> int:
        """Copy a part into its views. Returns the digest of the received bytes, computed while they are in a core's
        cache."""
        running = RunningDigest(self.layout.digest)
        readable = running.readable(section) if check else None
        in_chunks = section.device.type == "cpu" and all(view.is_contiguous() for view in views)
        raws = [as_bytes(view) for view in views] if in_chunks else []
        step = _CHUNK_BYTES if in_chunks else max(section.numel(), 1)
        for low in range(0, section.numel(), step):
            began = time.perf_counter()
            if readable is not None:
                running.update(readable[low : low + step])
            checked = time.perf_counter()
            for raw in raws:
                raw[low : low + step].copy_(section[low : low + step])
            progress.verify_s += checked - began
            self._load_s += time.perf_counter() - checked
        if not in_chunks:
            began = time.perf_counter()
            for view in views:
                view.copy_(section.view(view.dtype).view(part.shape))
            self._load_s += time.perf_counter() - began
        return running.value if check else 0

    def commit(self, read_back: ReadBack | None = None) -> Ack:
        """Prove that everything was received and is in the right tensors, then raise the version.

        read_back: for the read-back proof (P15). None = the engine can't read back; then the targets are compared with
        the trainer's digests, which still verifies cutting and joining, and the Ack has read_back None.
        Raises: SyncError naming the first incomplete tensor, or every tensor that differs.
        """
        self._leave("commit", "open")
        progress, expected = self._progress, self._expected
        assert progress is not None and expected is not None
        progress.check_complete()
        began = time.perf_counter()
        if read_back is None:
            own = self.targets()
            expected.compare(own.items(), {name: name for name in own}, self.name, self._committed)
        else:
            names = {name: name for name in self.layout.by_name} | self.layout.tied
            expected.compare(read_back(), names, self.name, self._committed)
        verify_s = progress.verify_s + time.perf_counter() - began
        num_changed = None if self._committed is None else expected.num_changed(self._committed)
        self._committed, self._expected, self._progress, self._writes = expected, None, None, {}
        self._phase = "idle"
        return Ack(
            version=expected.version,
            receiver=self.name,
            wire=True,
            read_back=None if read_back is None else True,
            num_bytes=progress.num_bytes,
            num_tensors=len(self.layout.tensors),
            num_changed=num_changed,
            seconds={"load": self._load_s, "verify": verify_s},
        )

    def cancel(self) -> None:
        """Make the weights unusable until the next full sync. May be called at any time, and repeatedly."""
        self._phase, self._writes = "cancelled", {}

    def _leave(self, step: str, *allowed: str) -> None:
        """Check that `step` is allowed now, and set the phase to cancelled until the step's end."""
        phase, self._phase = self._phase, "cancelled"
        require_phase(self.name, step, phase, *allowed)

    def _bind(self) -> dict[str, list[torch.Tensor]]:
        """The target tensors of each sent tensor."""
        targets = self._find_targets()
        held = describe(targets)
        reconcile(self.layout, held, {a: source for a, source in self.layout.tied.items() if a not in held})
        writes = {name: [targets[name]] for name in self.layout.by_name}
        for alias, source in self.layout.tied.items():
            if alias in held and targets[alias].data_ptr() != targets[source].data_ptr():
                writes[source].append(targets[alias])
        for name, target in targets.items():
            last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride()))
            end = (target.storage_offset() + last + 1) * target.element_size() if target.numel() else 0
            if target.untyped_storage().nbytes() < end:
                raise SyncError(f"{self.name}: the tensor to write {name} into has no memory (released?)")
        return writes


def require_phase(name: str, step: str, phase: str, *allowed: str) -> None:
    """Raises: SyncError when a step of a sync is called out of order."""
    if phase not in allowed:
        raise SyncError(
            f"{name}: {step} is not allowed while the receiver is {phase}; the order is begin, receive for each "
            "transfer, then commit or cancel. A new begin starts over"
        )


def check_header(name: str, header: SyncHeader, layout: Layout, had: int, last: int) -> None:
    """Check that a sync may begin. had: the current version. last: the version received last. -1 = none.

    After a cancel the last version may be sent again, in full, as a retry.

    Raises: SyncError for another layout, a version that does not rise, or a base other than the current version.
    """
    if header.layout_hash != layout.hash:
        raise SyncError(
            f"{name}: the header belongs to layout {header.layout_hash}, this receiver was set up for layout "
            f"{layout.hash}; reconcile again whenever names, shapes, dtypes, shards or the transfer size change"
        )
    if (header.mode != "full") != (header.base_version is not None):
        raise SyncError(
            f"{name}: the header has mode {header.mode!r} and base version {header.base_version}; 'full' has no base "
            "version, 'delta' and 'adapter' need one"
        )
    if header.base_version is not None and header.base_version != had:
        raise SyncError(
            f"{name}: a sync of mode {header.mode} needs base version {header.base_version}, but the current "
            f"version is {had} (-1 = none); send everything"
        )
    lowest = max(last + 1 if had >= 0 else last, 0)
    if header.version < lowest:
        raise SyncError(
            f"{name}: version {header.version} does not rise above version {last}, which was received last; send "
            f"{lowest} or more"
        )
