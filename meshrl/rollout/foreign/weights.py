"""The weights of a server as its engine sees them: which version they are, and a sync as a transaction over its
workers, one for each tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any, Literal

from meshrl.core.errors import StaleWeightsError, SyncError, UnloadedParamsError
from meshrl.rollout.foreign.arrival import header_to, ref_to
from meshrl.rollout.foreign.kept import Kept
from meshrl.sync.manifest import Ack, Layout, SyncHeader
from meshrl.sync.receive import Bucket, Place, check_header, reconcile
from meshrl.sync.transport import SharedRing

_RING_SLOTS = 1  # a bucket is taken before the next one comes
_SHOWN = 20  # tensors listed in an error

Call = Callable[[str, dict[str, Any]], Awaitable[list[dict[str, Any]]]]
"""`await call(method, arguments)` runs a WeightsExtension method in every worker; one answer from each."""


class RemoteWeights:
    """idle -> begin -> open -> receive* -> commit -> idle, or cancelled until the next begin. Whatever fails leaves
    the state cancelled.

    keep: hold what is in place in shared memory too, so that a sync may bring changes alone.
    """

    def __init__(self, call: Call, name: str, keep: bool = False):
        self.name, self._keep = name, keep
        self._call_workers = call
        self._layout: Layout | None = None
        self._phase: Literal["idle", "open", "cancelled"] = "idle"
        self._committed: SyncHeader | None = None
        self._header: SyncHeader | None = None  # of the sync that is under way
        self._trusted: int | None = None
        self._as_loaded = True  # no sync has touched what the folder held
        self._hidden: set[str] = set()  # loaded through arithmetic, so not to be read back
        self._ring: SharedRing | None = None
        self._kept: Kept | None = None
        self._num_bytes = 0  # that came

    @property
    def version(self) -> int:
        """The version in place; -1 = none: before the first sync, during one, after a cancel or a release."""
        if self._trusted is not None:
            return self._trusted
        return self._committed.version if self._committed is not None and self._phase == "idle" else -1

    @property
    def expected(self) -> int:
        """The version in place or, during a sync, the one that is arriving."""
        return self.version if self._header is None else self._header.version

    def trust(self, version: int) -> None:
        """Call what was loaded from the folder by this version. Raises: StaleWeightsError."""
        if not self._as_loaded:
            raise StaleWeightsError(
                f"{self.name} no longer holds the weights of its folder: a sync or a release has replaced them; "
                "build a new engine, or sync"
            )
        self._trusted = version

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with what the server's loader does with it, both ways; forget all earlier syncs.

        Raises: UnloadedParamsError; SyncError when there is no room to keep it.
        """
        self._layout, self._committed, self._header, self._phase = layout, None, None, "idle"
        self.close()
        answers = await self._call("meshrl_reconcile", layout=asdict(layout))
        self._hidden = {name for answer in answers for name in answer["hidden"]}
        shapes = {entry.name: (entry.shape, entry.dtype) for entry in layout.entries}
        shapes |= {alias: shapes[source] for alias, source in layout.tied.items()}
        held = {name: shapes[name] for name in self._hidden}
        for answer in answers:
            held |= {name: (shapes[name][0], dtype) for name, dtype in answer["dtypes"].items()}
            held |= {name: (tuple(shape), dtype) for name, (shape, dtype) in answer["unfilled"].items()}
        try:
            reconcile(layout, held, {alias: source for alias, source in layout.tied.items() if alias not in held})
        except UnloadedParamsError as error:
            refused = {name: why for answer in answers for name, why in answer["refused"].items()}
            if refused:
                said = "\n".join(f"    {name}: {why}" for name, why in list(refused.items())[:_SHOWN])
                raise UnloadedParamsError(f"{error}\nthe server's loader said:\n{said}") from error
            raise

    async def begin(self, header: SyncHeader) -> None:
        """Open a sync. The workers always get everything: what is kept, with the changes. Raises: SyncError."""
        layout, last = self._needed_layout(), -1 if self._committed is None else self._committed.version
        had = last if self._phase == "idle" else -1
        self._leave("begin", "idle", "cancelled")
        self._trusted, self._as_loaded = None, False
        check_header(self.name, header, layout, had, last)
        if header.mode != "full" and self._kept is None:
            raise SyncError(
                f"{self.name}: changes alone came, but nothing is kept here (rollout.sync_mode); send everything"
            )
        if self._keep and self._kept is None:
            self._kept = Kept(layout, self.name)
        self._header, self._num_bytes = header, 0
        await self._call("meshrl_begin", header=header_to(replace(header, mode="full", base_version=None)))
        self._enter("open", header)

    async def receive(self, bucket: Bucket) -> None:
        """Tell the workers where the bucket lies; one that lies in no shared memory is copied into some first."""
        self._leave(f"bucket {bucket.index}", "open")
        self._num_bytes += bucket.payload.numel()
        if self._kept is not None:
            bucket = self._kept.whole(bucket)
        place = bucket.place or self._copied(bucket)
        ring = {"name": place.ring, "num_slots": place.num_slots, "slot_bytes": place.slot_bytes}
        header = self._header
        await self._call("meshrl_receive", ring=ring, ref=ref_to(bucket, place.slot))
        self._enter("open", header)

    async def commit(self) -> Ack:
        """Have the workers finish and read back; compare with the trainer's digests. Raises: SyncError."""
        self._leave("commit", "open")
        header, layout = self._header, self._needed_layout()
        assert header is not None
        answers = await self._call("meshrl_commit")
        faults = list(dict.fromkeys(fault for answer in answers for fault in answer["differing"]))
        if faults:
            lines = "\n".join(f"    {fault}" for fault in faults[:_SHOWN])
            raise SyncError(
                f"{self.name}: version {header.version} is not in place; {len(faults)} of {len(layout.entries)} "
                f"tensors differ from the trainer's:\n{lines}\nThis receiver stays unusable until the next full sync"
            )
        self._enter("idle", header)
        self._committed, self._header = header, None
        return Ack(
            version=header.version,
            receiver=self.name,
            wire=True,
            resident=None if self._hidden else True,
            num_bytes=self._num_bytes,
            num_tensors=len(layout.entries),
            seconds={part: max(answer["seconds"][part] for answer in answers) for part in ("load", "verify")},
        )

    async def cancel(self) -> None:
        """The weights are a mixture; nothing is sampled before the next full sync."""
        self._phase, self._trusted, self._header = "cancelled", None, None
        if self._layout is not None:
            await self._call("meshrl_cancel")

    def drop(self) -> None:
        """What the server holds is gone, or a mixture that it has been told of; as after `cancel`."""
        self._phase, self._trusted, self._header, self._as_loaded = "cancelled", None, None, False

    def close(self) -> None:
        for held in (self._ring, self._kept):
            if held is not None:
                held.close()
        self._ring = self._kept = None

    def _copied(self, bucket: Bucket) -> Place:
        size = self._needed_layout().staging_bytes
        if self._ring is None:
            self._ring = SharedRing(_RING_SLOTS, size)
        self._ring.slots[0][: bucket.payload.numel()].copy_(bucket.payload)
        return Place(ring=self._ring.name, num_slots=_RING_SLOTS, slot_bytes=size, slot=0)

    def _leave(self, step: str, *allowed: str) -> None:
        """Check that `step` may come now, and mark the state cancelled until the step's end."""
        phase, self._phase = self._phase, "cancelled"
        if phase not in allowed:
            raise SyncError(
                f"{self.name}: {step} came while the receiver was {phase}; the order is begin, receive for each "
                "bucket, then commit or cancel. A new begin starts over"
            )

    def _enter(self, phase: Literal["idle", "open"], header: SyncHeader | None) -> None:
        """The step is done. Raises: SyncError when its sync was given up meanwhile."""
        if self._header is not header:
            raise SyncError(f"{self.name}: the sync was given up while its server was still at work")
        self._phase = phase

    async def _call(self, method: str, **arguments: Any) -> list[dict[str, Any]]:
        answers = await self._call_workers(method, arguments)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise SyncError(errors[0])
        return answers

    def _needed_layout(self) -> Layout:
        if self._layout is None:
            raise SyncError(f"{self.name}: a sync came before reconcile; send the layout once, before the first sync")
        return self._layout
