"""A sync as a transaction: the protocol of its receivers, the state of an engine's weights, and one rank's part: it
sends, receives, or both; all ranks handle the same list of transfers in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from meshrl.core.errors import StaleWeightsError, SyncError
from meshrl.monitor.recorder import recorder
from meshrl.sync.delivery import Address, Delivery, Transport
from meshrl.sync.layout import Ack, Layout, SyncHeader, SyncMode, Transfer
from meshrl.sync.sender import SendReport, WeightSender


class WeightReceiver(Protocol):
    """The receiving half of a sync: begin -> receive* -> commit | cancel."""

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the engine's own parameters, both ways. Raises UnloadedParamsError."""
        ...

    async def begin(self, header: SyncHeader) -> None:
        """Close admission, flush every cache that depends on the weights, and expect this version's transfers."""
        ...

    async def receive(self, *deliveries: Delivery) -> None:
        """Load the next transfers; their payloads are not used after this returns."""
        ...

    async def commit(self) -> Ack:
        """Verify what was received, make the version visible, open admission. Raises SyncError naming what differs."""
        ...

    async def cancel(self) -> None:
        """Cancel the sync: the weights are a mixture, and unusable until the next full sync. May be called at any
        time."""
        ...


class WeightState:
    """Which weights an engine has. Each engine owns one, and each step of a sync goes through it.

        loaded, valid, invalid, released -- begin --> arriving -- receive* --> arriving -- commit --> valid

    loaded: the weights of the model folder. valid: those of the last sync, proven. arriving: a sync is open, and its
    next step may start. incomplete: a step of it runs, so that only begin and cancel are allowed. invalid: a mixture,
    after `cancel` or a step that failed or was out of order, or not read from the folder. released: without memory, or
    restored without values.

    name: of the engine, in errors. layout: of the syncs; None = before `reconcile`.
    """

    def __init__(self, name: str):
        self.name = name
        self.state: Literal["loaded", "arriving", "incomplete", "valid", "invalid", "released"] = "loaded"
        self.layout: Layout | None = None
        self._header: SyncHeader | None = None  # of the open sync
        self._last = -1  # the version received last; -1 = none
        self._loaded = -1  # the version number of loaded weights

    @property
    def version(self) -> int:
        """The version in place; -1 = none: before the first sync, during one, after a cancel or a release."""
        return {"loaded": self._loaded, "valid": self._last}.get(self.state, -1)

    @property
    def expected(self) -> int:
        """The version in place or, from `begin` to the commit or cancel, the version of that sync."""
        return self.version if self._header is None else self._header.version

    @property
    def awaits_sync(self) -> bool:
        """Whether requests in place have to wait for the end of a sync."""
        return self.state == "released" or self._header is not None

    def trust(self, version: int) -> None:
        """Use the weights of the model folder under this version number: for evaluation, where no trainer sends any."""
        if self.state != "loaded":
            raise StaleWeightsError(
                f"{self.name} never had or no longer has the weights of its model folder: a sync brings them, or a "
                "sync, a cancel or a release has replaced them; build a new engine, or sync"
            )
        self._loaded = version

    def reconcile(self, layout: Layout) -> None:
        """Later syncs have this layout; what earlier ones sent no longer counts."""
        if self.state not in ("loaded", "released"):
            self.state = "invalid"
        self.layout, self._header, self._last = layout, None, -1

    def end(self, state: Literal["invalid", "released"]) -> None:
        """The weights are gone, and no sync is open."""
        self.state, self._header = state, None

    @contextmanager
    def begin(self, header: SyncHeader) -> Iterator[Layout]:
        """The step that opens a sync. After a cancel the last version may be sent again, in full, as a retry."""
        layout, had = self.layout, self._last if self.state == "valid" else -1
        if layout is None:
            raise SyncError(f"{self.name}: a sync came before reconcile; send the layout once, before the first sync")
        state, self.state, self._header = self.state, "invalid", None
        if state == "arriving":
            raise self._refusal("begin", state)
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
        self.state, self._header = "arriving", header
        with self.step("begin"):
            yield layout

    @contextmanager
    def step(self, step: object, then: Literal["arriving", "valid"] = "arriving") -> Iterator[SyncHeader]:
        """One step of the open sync. then: the state after it."""
        state, header = self.state, self._header
        if state != "arriving" or header is None:
            self.state = "invalid" if state in ("loaded", "valid") else state
            raise self._refusal(step, state)
        self.state = "incomplete"
        try:
            yield header
        except BaseException:
            if self._header is header:
                self.end("invalid")
            raise
        if self._header is not header:
            raise SyncError(f"{self.name}: the sync was cancelled while its server was still at work")
        self.state = then
        if then == "valid":
            self._last, self._header = header.version, None

    def _refusal(self, step: object, state: str) -> SyncError:
        return SyncError(
            f"{self.name}: {step} is not allowed while the weights are {state}; the order is begin, receive for each "
            "transfer, then commit or cancel. A new begin starts over"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncState:
    """A rank's state before the next sync. sender: its number among the senders of its replica; None = it does not
    train, or other ranks send its weights. address: for its receivers. base_version: the version on which it can send
    changes; None = none. version: of its sampler, -1 = none; None = it does not sample."""

    sender: int | None = None
    replica: int = 0
    address: Address | None = None
    base_version: int | None = None
    version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOrder:
    """One rank's part in one sync. connection_id: changes when a rank was replaced or a sync was cancelled; connections
    are kept while it stays the same. senders: the senders that this rank receives from. number: this rank's number
    among the samplers. num_receivers: how many ranks receive what this rank sends, without itself; for a rank that only
    receives, how many receive what its senders send."""

    header: SyncHeader
    connection_id: str
    senders: Mapping[int, Address] = field(default_factory=dict)
    number: int = 0
    num_receivers: int = 0


async def sync_rank(
    order: SyncOrder,
    layout: Layout,
    transport: Transport | None,
    sender: WeightSender | None,
    receiver: WeightReceiver | None,
    targets: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> Ack | None:
    """Send and receive all transfers, then verify what was received (`WeightReceiver.commit`).

    sender: after its `begin`. targets: returns the receiver's own tensors after its `begin`; a sender that holds all
    weights writes into them, without a transport. Waits for: the other ranks. Unblocked by: cancelling its task, or a
    rank that disconnects. After an error the caller cancels the receiver and disconnects the transport.
    """
    started_at = time.perf_counter()
    if receiver is not None:
        await receiver.begin(order.header)
    if sender is not None and targets is not None and receiver is not None:
        with recorder.span("write", "copy", bytes=layout.num_bytes):
            for delivery in sender.write(targets()):
                await receiver.receive(delivery)
    elif transport is not None:
        await transport.connect(order.connection_id, order.senders, order.number, order.num_receivers)
        await _run_windows(layout.windows, transport, sender, receiver)
    if sender is not None:
        sender.finish(order.header.version)
        sender.report.extra_bytes += 0 if transport is None else transport.num_bytes
    if receiver is None:
        return None
    ack = await receiver.commit()
    worked = sum(ack.seconds.values()) + (0.0 if sender is None else sum(sender.report.seconds.values()))
    return replace(ack, seconds={**ack.seconds, "wait": max(time.perf_counter() - started_at - worked, 0.0)})


async def _run_windows(
    windows: Sequence[Sequence[Transfer]],
    transport: Transport,
    sender: WeightSender | None,
    receiver: WeightReceiver | None,
) -> None:
    """Send and receive the windows in order, at most two at a time: while a server loads one, the next one is cast and,
    if the transport has memory for both, sent. All senders cast at the same time, each its own transfer of the
    window."""
    loading: asyncio.Future[None] | None = None
    try:
        for window in windows:
            filled = await _fill(window, transport, sender)
            if loading is not None and (loading.done() or not transport.double_buffered):
                await loading
            with recorder.span("get", "copy", bytes=_num_bytes(window)):  # with the wait for the senders
                deliveries = await transport.exchange(window, filled, receiver is not None)
            if loading is not None:
                await loading
            if receiver is not None and deliveries:
                loading = asyncio.ensure_future(_load(window, deliveries, filled, transport, receiver))
                await asyncio.sleep(0)  # it begins, so that a server has its request before this rank casts
        if loading is not None:
            await loading
    finally:
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


async def _fill(window: Sequence[Transfer], transport: Transport, sender: WeightSender | None) -> Delivery | None:
    """Cast this rank's transfer of the window, if it has one, into its slot."""
    for transfer in window:
        if sender is not None and transfer.sender == sender.sender:
            slot = await transport.buffer(transfer)
            with recorder.span("fill", "copy", bytes=transfer.num_bytes):
                return sender.fill(transfer, slot)
    return None


async def _load(
    window: Sequence[Transfer],
    deliveries: Sequence[Delivery],
    filled: Delivery | None,
    transport: Transport,
    receiver: WeightReceiver,
) -> None:
    """Load a window, then let the other senders use its slots again."""
    with recorder.span("load", "copy", bytes=_num_bytes(window)):
        await receiver.receive(*deliveries)
    for delivery in deliveries:
        if filled is None or delivery.transfer is not filled.transfer:
            await transport.release_slot(delivery)


def _num_bytes(window: Sequence[Transfer]) -> int:
    return sum(transfer.num_bytes for transfer in window)


def make_header(layout: Layout, version: int, states: Sequence[SyncState], mode: SyncMode) -> SyncHeader:
    """The header of one sync. It has this mode if all senders have the same base version and all samplers hold that
    version, else mode full."""
    versions = {state.base_version for state in states if state.sender is not None}
    versions |= {state.version for state in states if state.version is not None}
    base = versions.pop() if len(versions) == 1 else None
    if base is None or base < 0:
        return SyncHeader(version=version, layout_hash=layout.hash)
    return SyncHeader(version=version, base_version=base, mode=mode, layout_hash=layout.hash)


def with_reports(acks: Sequence[Ack], reports: Sequence[SendReport], header: SyncHeader) -> list[Ack]:
    """The acknowledgements, completed by the senders' reports of the same sync; seconds of the slowest rank in each
    stage."""
    for ack in acks:
        if ack.version != header.version or ack.wire is not True or ack.read_back is False:
            raise SyncError(
                f"{ack.receiver} acknowledged version {ack.version}, wire {ack.wire}, read_back {ack.read_back}; "
                f"expected version {header.version}, wire True, read_back True (or None from an engine that can't read "
                "back)"
            )
    slowest = {
        stage: max([report.seconds.get(stage, 0.0) for report in reports], default=0.0)
        for stage in ("cast", "load", "verify", "wait")
    }
    counts = [report.num_changed for report in reports if report.num_changed is not None]
    changed = sum(counts) if reports and len(counts) == len(reports) else None
    extra = sum(report.extra_bytes for report in reports)
    projection, square = (sum(report.lora_change[i] for report in reports) for i in (0, 1))
    return [
        replace(
            ack,
            seconds={stage: taken + ack.seconds.get(stage, 0.0) for stage, taken in slowest.items()},
            num_changed_elements=changed,
            extra_bytes=extra,
            lora_change=(projection + ack.lora_change[0], square + ack.lora_change[1]),
        )
        for ack in acks
    ]
