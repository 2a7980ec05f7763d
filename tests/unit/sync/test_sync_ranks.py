"""Ranks that send and receive one list of transfers over sockets: contents, and how waits end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_sync import Rank, Sampler, held_of, layout_on, sync_ranks, trained, weights_of

from meshrl.core.errors import SyncError
from meshrl.sync.layout import Ack, Layout, make_layout
from meshrl.sync.sender import SendReport, WeightSender
from meshrl.sync.sockets import Sockets
from meshrl.sync.transaction import SyncState, make_header, with_reports


@contextmanager
def ranks_over_sockets(layout: Layout, samplers: int | None, machines: bool = False) -> Iterator[list[Rank]]:
    """samplers: number of ranks that only sample; None = each sender also samples. machines: spread over two
    machines."""
    num_senders = len(layout.senders)
    ranks = []
    for number in range(num_senders + (samplers or 0)):
        sender = WeightSender(layout, number, keep_base=True) if number < num_senders else None
        samples = samplers is None or sender is None
        transport = Sockets(layout, None if sender is None else number, "127.0.0.1", number % 2 if machines else 0)
        ranks.append(Rank(layout, transport, sender, Sampler(layout, f"sampler {number}") if samples else None))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.transport.close()


def all_hold(ranks: Sequence[Rank], weights: dict[str, torch.Tensor]) -> bool:
    return all(rank.engine.holds(weights) for rank in ranks if rank.engine is not None)


@pytest.mark.parametrize("machines", [False, True], ids=["one machine", "two machines"])
@pytest.mark.parametrize("samplers", [None, 1, 2], ids=["colocated", "one sampler", "two samplers"])
@pytest.mark.parametrize("mesh", ["one rank", "rows", "columns", "3 x 2", "fused", "replicas"])
async def test_every_mesh_reaches_every_sampler_to_the_bit(mesh, samplers, machines):
    """Everything, then only changes, then everything after a cancelled sampler."""
    with ranks_over_sockets(layout_on(mesh, 2048 * len(layout_on(mesh).senders)), samplers, machines) as ranks:
        sizes, weights = [], weights_of()
        for version in range(3):
            acks = await sync_ranks(ranks, weights, version)
            assert len(acks) == len([r for r in ranks if r.engine is not None]) and all_hold(ranks, weights)
            assert {(ack.version, ack.wire, ack.read_back) for ack in acks} == {(version, True, True)}
            sizes.append(acks[0].num_bytes)
            weights = trained(weights, version, 0.02)
        assert max(sizes[1:]) < sizes[0] / 3
        await ranks[-1].engine.cancel()
        (full, *_) = await sync_ranks(ranks, weights, 3)
        assert full.num_bytes == sizes[0] and all_hold(ranks, weights)


@pytest.mark.parametrize("stage", ["begin", "receive", "commit"])
@pytest.mark.parametrize("samplers", [None, 2], ids=["colocated", "apart"])
async def test_a_failing_rank_ends_the_sync_of_all_ranks(samplers, stage):
    """Also of ranks that have already committed; all waits end. The next sync sends everything."""

    async def fail(*_: Any) -> None:
        raise SyncError(f"lost power at {stage}")

    with ranks_over_sockets(layout_on("rows", 512), samplers) as ranks:
        await sync_ranks(ranks, weights_of(), 0)
        setattr(ranks[-1].engine, stage, fail)
        with pytest.raises(SyncError, match=f"lost power at {stage}"):
            await sync_ranks(ranks, weights_of(1), 1)
        assert {rank.engine.receiver.state.version for rank in ranks if rank.engine is not None} == {-1}
        delattr(ranks[-1].engine, stage)
        (ack, *_) = await sync_ranks(ranks, weights_of(2), 2, "after an error")
        assert ack.num_bytes >= ranks[0].layout.num_bytes and all_hold(ranks, weights_of(2))


async def test_a_rank_that_disconnects_ends_the_waits_of_others():
    with ranks_over_sockets(layout_on("rows", 512), 1) as ranks:

        class Stuck(Sampler):
            async def receive(self, *deliveries):
                blocked.set()
                await asyncio.Event().wait()

        blocked = asyncio.Event()
        ranks[-1].engine = Stuck(ranks[-1].layout)
        states = [rank.state("first") for rank in ranks]
        sync = asyncio.ensure_future(sync_ranks(ranks, weights_of(), 0))
        await blocked.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sync.done() and states[0].address is not None
        ranks[-1].transport.disconnect()  # as at the end of its process
        with pytest.raises(SyncError, match="could not be sent to a receiver"):
            await sync


# ---- one connection


@contextmanager
def one_link(layout: Layout, machines: bool = False) -> Iterator[tuple[WeightSender, Sockets, Sockets]]:
    """A sender after begin, and both ends of its connection."""
    ends = Sockets(layout, 0, "127.0.0.1", 0), Sockets(layout, None, "127.0.0.1", int(machines))
    sender = WeightSender(layout, 0, keep_base=False)
    weights = {t.name: torch.full(t.shape, 7.0) for t in layout.tensors}
    sender.begin(held_of(weights, layout.senders[0]))
    try:
        yield sender, *ends
    finally:
        for end in ends:
            end.close()


async def connect(ours: Sockets, theirs: Sockets, connection_id: str = "first") -> None:
    address = ours.prepare(connection_id)
    assert address is not None
    await asyncio.gather(
        ours.connect(connection_id, {}, 0, num_receivers=1),
        theirs.connect(connection_id, {0: address}, 0, num_receivers=0),
    )


LAYOUT = make_layout({"w": ((64,), "float32"), "x": ((64,), "float32"), "y": ((64,), "float32")}, transfer_bytes=256)
LARGE = make_layout({"w": ((48 << 20,), "uint8")})


@pytest.mark.parametrize("machines", [False, True], ids=["one machine", "two machines"])
async def test_a_slot_is_not_filled_again_before_it_is_released(machines):
    with one_link(LAYOUT, machines) as (sender, ours, theirs):
        await connect(ours, theirs)
        first, second, third = LAYOUT.transfers
        for transfer in (first, second):
            await ours.put(sender.fill(transfer, await ours.buffer(transfer)))
        slot = asyncio.ensure_future(ours.buffer(third))
        delivery = await theirs.get(first)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not slot.done() and delivery.payload.view(torch.float32).tolist() == [7.0] * 64
        await theirs.release_slot(delivery)
        await ours.put(sender.fill(third, await slot))
        for transfer in (second, third):
            again = await theirs.get(transfer)
            assert (again.digests, again.num_bytes) == (delivery.digests, 256)
            assert (again.slot_address is None) == machines
            await theirs.release_slot(again)


@pytest.mark.parametrize("end", ["its task is cancelled", "the other side disconnects"])
@pytest.mark.parametrize("wait", ["get", "buffer", "put", "connect"])
async def test_blocked_calls_end(wait, end):
    layout = LARGE if wait == "put" else LAYOUT
    with one_link(layout, machines=True) as (sender, ours, theirs):
        first = layout.transfers[0]
        if wait != "connect":
            await connect(ours, theirs)
        if wait == "get":
            blocked, other = theirs.get(first), ours
        elif wait == "buffer":
            await ours.put(sender.fill(first, await ours.buffer(first)))
            blocked, other = ours.buffer(replace(first, index=2)), theirs
        elif wait == "put":
            blocked, other = ours.put(sender.fill(first, await ours.buffer(first))), theirs
        else:
            blocked, other = ours.connect("first", {}, 0, num_receivers=1), theirs
        task = asyncio.ensure_future(blocked)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        if end == "its task is cancelled" or wait == "connect":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            other.disconnect()
            with pytest.raises(SyncError, match=r"transfer 0 .*(was not received from|could not be sent to) "):
                await task


async def test_receivers_without_the_token_or_of_an_earlier_sync_get_nothing():
    with one_link(LAYOUT) as (sender, ours, theirs):
        address = ours.prepare("second")
        others = [Sockets(LAYOUT, None, "127.0.0.1", 1) for _ in range(2)]
        silent = socket.create_connection((address.host, address.port))
        serving = asyncio.ensure_future(ours.connect("second", {}, 0, num_receivers=1))
        await others[0].connect("second", {0: replace(address, token="0" * 64)}, 0, 0)
        await others[1].connect("first", {0: address}, 0, 0)
        for other in others:
            with pytest.raises(SyncError, match=r"transfer 0 .* was not received from its sender"):
                await other.get(LAYOUT.transfers[0])
            other.close()
        assert not serving.done()
        await theirs.connect("second", {0: address}, 0, 0)
        await serving
        await ours.put(sender.fill(LAYOUT.transfers[0], await ours.buffer(LAYOUT.transfers[0])))
        assert (await theirs.get(LAYOUT.transfers[0])).num_bytes == 256
        silent.close()


async def test_a_sender_that_can_not_be_reached_is_named():
    with one_link(LAYOUT) as (_, ours, theirs):
        address = ours.prepare("first")
        ours.close()
        with pytest.raises(SyncError, match=rf"at 127\.0\.0\.1:{address.port} can't be reached"):
            await theirs.connect("first", {0: address}, 0, 0)


# ---- the header before a sync and the acknowledgements after it


def test_only_changes_are_sent_if_all_senders_and_samplers_hold_one_version():
    def header(*states: SyncState) -> tuple[int | None, str]:
        made = make_header(LAYOUT, 9, states, "delta")
        return made.base_version, made.mode

    trains, samples = SyncState(sender=0, base_version=8), SyncState(version=8)
    assert header(trains, samples, SyncState(sender=1, base_version=8, version=8)) == (8, "delta")
    assert header(trains, samples, SyncState()) == (8, "delta")  # a rank that takes no part
    for other in (
        SyncState(sender=1),
        SyncState(sender=1, base_version=7),
        SyncState(version=7),
        SyncState(version=-1),
    ):
        assert header(trains, samples, other) == (None, "full")
    assert header(SyncState(sender=0), SyncState(version=-1)) == (None, "full")


ACK = Ack(version=9, receiver="one", wire=True, read_back=True, num_bytes=8, num_tensors=1)


@pytest.mark.parametrize("change", [{"version": 7}, {"wire": False}, {"read_back": False}])
def test_an_ack_that_does_not_prove_the_sync_is_refused(change):
    header = make_header(LAYOUT, 9, [], "delta")
    assert with_reports([ACK, replace(ACK, read_back=None)], [], header)
    with pytest.raises(SyncError, match=r"wrong acknowledged .* expected version 9"):
        with_reports([ACK, replace(ACK, receiver="wrong", **change)], [], header)


def test_every_ack_has_the_reports_of_all_senders():
    header = make_header(LAYOUT, 9, [], "delta")
    ack = replace(ACK, seconds={"load": 1.0, "verify": 1.0, "wait": 5.0})
    reports = [
        SendReport(num_changed=3, extra_bytes=10, seconds={"cast": 3.0, "verify": 1.0}),
        SendReport(num_changed=4, extra_bytes=20, seconds={"cast": 2.0, "verify": 2.0}),
    ]
    for stated in with_reports([ack, ack], reports, header):
        assert stated.seconds == {"cast": 3.0, "load": 1.0, "verify": 3.0, "wait": 5.0}
        assert (stated.num_changed_elements, stated.extra_bytes) == (7, 30)
    reports[1].num_changed = None
    assert with_reports([ack], reports, header)[0].num_changed_elements is None
