"""One rank's part in one sync: it sends, receives, or both; all ranks handle the same list of transfers in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from meshrl.core.errors import SyncError
from meshrl.monitor.recorder import recorder
from meshrl.sync.layout import Ack, Layout, SyncHeader, SyncMode, Transfer
from meshrl.sync.receiver import WeightReceiver
from meshrl.sync.sender import SendReport, WeightSender
from meshrl.sync.transport import Address, Transport


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
    rank that disconnects. Raises: SyncError; the caller then cancels the receiver and disconnects the transport.
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
        for window in layout.windows:
            await _run_window(window, transport, sender, receiver)
    if sender is not None:
        sender.finish(order.header.version)
        sender.report.extra_bytes += 0 if transport is None else transport.num_bytes
    if receiver is None:
        return None
    ack = await receiver.commit()
    worked = sum(ack.seconds.values()) + (0.0 if sender is None else sum(sender.report.seconds.values()))
    return replace(ack, seconds={**ack.seconds, "wait": max(time.perf_counter() - started_at - worked, 0.0)})


async def _run_window(
    window: Sequence[Transfer], transport: Transport, sender: WeightSender | None, receiver: WeightReceiver | None
) -> None:
    """Send and receive one transfer of each sender. A sender fills its own transfer first, so that all senders cast at
    the same time."""
    filled = None
    for transfer in window:
        if sender is not None and transfer.sender == sender.sender:
            slot = await transport.buffer(transfer)
            with recorder.span("fill", "copy", bytes=transfer.num_bytes):
                filled = sender.fill(transfer, slot)
    for transfer in window:
        if filled is not None and transfer is filled.transfer:
            delivery = await transport.put(filled)
            if receiver is not None:
                await receiver.receive(delivery)
        elif receiver is not None or transport.collective:
            with recorder.span("get", "copy", bytes=transfer.num_bytes):  # with the wait for its sender
                delivery = await transport.get(transfer)
            if receiver is not None:
                with recorder.span("load", "copy", bytes=transfer.num_bytes):
                    await receiver.receive(delivery)
            await transport.release_slot(delivery)


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
    stage.

    Raises: SyncError for an acknowledgement of another version, or without a proof.
    """
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
    return [
        replace(
            ack,
            seconds={stage: taken + ack.seconds.get(stage, 0.0) for stage, taken in slowest.items()},
            num_changed_elements=changed,
            extra_bytes=extra,
        )
        for ack in acks
    ]
