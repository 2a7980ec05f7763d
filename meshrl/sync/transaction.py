"""One rank's part in one sync: it sends, receives, or both, and walks the same list of transfers as all others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from meshrl.core.errors import SyncError
from meshrl.sync.layout import Ack, Layout, SyncHeader, SyncMode, Transfer
from meshrl.sync.receiver import WeightReceiver
from meshrl.sync.sender import SendReport, WeightSender
from meshrl.sync.transport import Address, Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncState:
    """What a rank brings to the next sync. sender: its number among the senders of its replica; None = it does not
    train, or other ranks send in its place. address: where its receivers find it. base_version: that it could send the
    changes since; None = none. version: that its sampler holds, -1 = none; None = it does not sample."""

    sender: int | None = None
    replica: int = 0
    address: Address | None = None
    base_version: int | None = None
    version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOrder:
    """One rank's part in one sync. senders: those that it receives from. number: which of the samplers it is.
    num_receivers: of what it sends, without itself; for a rank that only receives: of what its senders send. occasion:
    another text where ranks have come or gone since the last sync, or that one was cancelled."""

    header: SyncHeader
    occasion: str
    senders: Mapping[int, Address] = field(default_factory=dict)
    number: int = 0
    num_receivers: int = 0


async def sync_rank(
    order: SyncOrder,
    layout: Layout,
    transport: Transport | None,
    sender: WeightSender | None,
    receiver: WeightReceiver | None,
    targets: Mapping[str, torch.Tensor] | None = None,
) -> Ack | None:
    """Walk all transfers, then prove what was received (`WeightReceiver.commit`).

    sender: begun. targets: the receiver's own tensors, which a sender that holds everything writes itself; there is no
    transport then. Waits for: the other ranks. Unblocked by: cancelling its task, or a rank that disconnects. Raises:
    SyncError; the caller cancels the receiver and disconnects the transport then.
    """
    began, waited = time.perf_counter(), 0.0
    if receiver is not None:
        await receiver.begin(order.header)
    if sender is not None and targets is not None and receiver is not None:
        for delivery in sender.write(targets):
            await receiver.receive(delivery)
    elif transport is not None:
        since = time.perf_counter()
        await transport.connect(order.occasion, order.senders, order.number, order.num_receivers)
        waited += time.perf_counter() - since
        for window in layout.windows:
            waited += await _walk(window, transport, sender, receiver)
    if sender is not None:
        sender.finish(order.header.version)
        sender.report.extra_bytes += 0 if transport is None else transport.num_bytes
    if receiver is None:
        return None
    ack = await receiver.commit()
    rest = time.perf_counter() - began - sum(ack.seconds.values())
    rest -= 0.0 if sender is None else sum(sender.report.seconds.values())
    return replace(ack, seconds={**ack.seconds, "wait": min(waited, max(rest, 0.0))})


async def _walk(
    window: Sequence[Transfer], transport: Transport, sender: WeightSender | None, receiver: WeightReceiver | None
) -> float:
    """Send and receive one transfer of each sender; the seconds spent waiting. The own one is filled first, so that all
    senders cast at the same time."""
    waited, since, filled = 0.0, time.perf_counter(), None
    for transfer in window:
        if sender is not None and transfer.sender == sender.sender:
            buffer = await transport.buffer(transfer)
            waited += time.perf_counter() - since
            filled = replace(sender.fill(transfer, buffer), place=transport.place(transfer))
    for transfer in window:
        since = time.perf_counter()
        if filled is not None and transfer is filled.transfer:
            await transport.put(filled)
            waited += time.perf_counter() - since
            if receiver is not None:
                await receiver.receive(filled)
        elif receiver is not None or transport.collective:
            delivery = await transport.get(transfer)
            waited += time.perf_counter() - since
            if receiver is not None:
                await receiver.receive(delivery)
            await transport.taken(delivery)
    return waited


def make_header(layout: Layout, version: int, states: Sequence[SyncState], mode: SyncMode) -> SyncHeader:
    """The header of one sync: of changes alone, if every sender remembers one version and every sampler holds it.
    mode: of a sync of changes alone."""
    versions = {state.base_version for state in states if state.sender is not None}
    versions |= {state.version for state in states if state.version is not None}
    base = versions.pop() if len(versions) == 1 else None
    if base is None or base < 0:
        return SyncHeader(version=version, layout_hash=layout.hash)
    return SyncHeader(version=version, base_version=base, mode=mode, layout_hash=layout.hash)


def with_reports(acks: Sequence[Ack], reports: Sequence[SendReport], header: SyncHeader) -> list[Ack]:
    """The acknowledgements, with what the senders state about the same sync: each stage of the slowest rank.

    Raises: SyncError when one is not what the sync was for.
    """
    for ack in acks:
        if ack.version != header.version or ack.wire is not True or ack.resident is False:
            raise SyncError(
                f"{ack.receiver} acknowledged version {ack.version}, wire {ack.wire}, resident {ack.resident}; "
                f"expected version {header.version}, wire True, resident True (or None from an engine that can't read "
                "back)"
            )
    slowest = {stage: 0.0 for stage in ("cast", "load", "verify", "wait")}
    for seconds in [report.seconds for report in reports]:
        for stage, taken in seconds.items():
            slowest[stage] = max(slowest[stage], taken)
    known = [report.num_changed for report in reports if report.num_changed is not None]
    changed = sum(known) if reports and len(known) == len(reports) else None
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
