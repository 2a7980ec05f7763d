"""Two windows of a sync are on their way at a time: the next one is cast, and sent where its transport has memory for
both, while a server loads the one before. Every payload is intact when it is loaded."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
import torch
from tiny_sync import Rank, Sampler, layout_on, sync_ranks, weights_of

from meshrl.core.errors import SyncError
from meshrl.sync.collectives import AllGather, Broadcast
from meshrl.sync.delivery import NUM_SLOTS, Delivery, Transport
from meshrl.sync.layout import Layout
from meshrl.sync.sender import WeightSender
from meshrl.sync.sockets import Sockets

CPU = torch.device("cpu")


class Server(Sampler):
    """It ends the load of a window when the next one is cast or, if `sent`, when it has arrived."""

    def __init__(self, layout: Layout, sent: bool):
        super().__init__(layout)
        self.layout, self.sent = layout, sent
        self.reached: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.events: list[tuple[str, int]] = []
        self.places: set[tuple[int, int]] = set()  # sender, address

    def note(self, event: str, window: int) -> None:
        self.events.append((event, window))
        if event == ("arrived" if self.sent else "cast"):
            self.reached[window].set()

    async def receive(self, *deliveries: Delivery) -> None:
        window = next(i for i, w in enumerate(self.layout.windows) if deliveries[0].transfer in w)
        self.events.append(("load", window))
        if window + 1 < len(self.layout.windows):
            await asyncio.wait_for(self.reached[window + 1].wait(), 10)
        else:
            await asyncio.sleep(0.01)  # a server takes its time for the last window, too
        self.places |= {(d.transfer.sender, d.payload.data_ptr()) for d in deliveries if d.payload is not None}
        await super().receive(*deliveries)
        self.events.append(("loaded", window))


def _rank(layout: Layout, transport: Transport, sender: int | None, colocated: bool) -> Rank:
    """A rank whose casts and exchanges are events of its server."""
    server = Server(layout, transport.double_buffered) if colocated or sender is None else None
    rank = Rank(layout, transport, None if sender is None else WeightSender(layout, sender, keep_base=True), server)
    if server is None:
        return rank
    exchange, numbers = transport.exchange, {id(window): i for i, window in enumerate(layout.windows)}

    async def observed(window: Any, filled: Delivery | None, receives: bool) -> list[Delivery]:
        arrived = await exchange(window, filled, receives)
        assert not receives or not getattr(transport, "_sending", ()), "payloads that are still on their way"
        server.note("arrived", numbers[id(window)])
        return arrived

    transport.exchange = observed  # type: ignore[method-assign]
    if rank.sender is not None:
        fill = rank.sender.fill

        def cast(transfer: Any, buffer: torch.Tensor) -> Delivery:
            window = next(i for i, w in enumerate(layout.windows) if transfer in w)
            assert ("load", window - 1) in [*server.events, ("load", -1)]
            assert ("loaded", window - 2) in server.events or window < NUM_SLOTS, "three windows at a time"
            server.note("cast", window)
            return fill(transfer, buffer)

        rank.sender.fill = cast  # type: ignore[method-assign]
    return rank


def _ranks(kind: str, layout: Layout) -> list[Rank]:
    senders, apart = range(len(layout.senders)), [] if kind.endswith("colocated") else [None, None]
    ends: list[Transport] = []
    for number, sender in enumerate([*senders, *apart]):
        if kind == "all-gather, colocated":
            ends.append(AllGather(layout, number, "127.0.0.1", CPU, 20.0))
        elif kind == "broadcast":
            ends.append(Broadcast(layout, sender, "127.0.0.1", CPU, 20.0))
        else:
            ends.append(Sockets(layout, sender, "127.0.0.1", 0 if "one machine" in kind else number))
    return [_rank(layout, end, sender, not apart) for end, sender in zip(ends, [*senders, *apart], strict=True)]


KINDS = [
    *("all-gather, colocated", "one machine, colocated", "machines, colocated"),
    *("one machine, apart", "machines, apart", "broadcast"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_window_is_cast_and_sent_while_one_is_loaded(kind: str) -> None:
    layout = layout_on("rows", 3 * 700)

    async def main(ranks: list[Rank]) -> None:
        for version in range(2):
            weights = weights_of(version)
            acks = await asyncio.wait_for(sync_ranks(ranks, weights, version), 60)
            assert {(ack.version, ack.wire, ack.read_back) for ack in acks} == {(version, True, True)}
            assert all(rank.transport.num_bytes for rank in ranks if rank.sender is not None)
            servers = [rank.engine for rank in ranks if rank.engine is not None]
            assert all(server.holds(weights) for server in servers)
            for server in servers:
                _require_overlap(server, len(layout.windows))
                server.reached.clear()
                server.events.clear()

    ranks = _ranks(kind, layout)
    try:
        asyncio.run(main(ranks))
    finally:
        for rank in ranks:
            rank.transport.close()


def _require_overlap(server: Server, num_windows: int) -> None:
    place = {event: i for i, event in enumerate(server.events)}
    first = "arrived" if server.sent else "cast"
    early = [n for n in range(num_windows - 1) if place.get((first, n + 1), 10**6) < place["loaded", n]]
    assert len(early) == num_windows - 1 > 2
    for n in range(num_windows - NUM_SLOTS):  # at most two windows at a time
        assert place["loaded", n] < place["arrived", n + NUM_SLOTS]
    if server.sent:  # else all are in one piece of memory, each time from its start
        assert len(server.places) <= NUM_SLOTS * len(server.layout.senders)


@pytest.mark.parametrize("kind", ["all-gather, colocated", "machines, apart"])
def test_a_load_that_fails_ends_the_sync_while_the_next_window_is_on_its_way(kind: str) -> None:
    """Its own error, not that of the ranks that were interrupted; the next sync sends everything."""
    layout = layout_on("rows", 3 * 700)

    async def main(ranks: list[Rank]) -> None:
        server = ranks[-1].engine
        take, fails = server.receiver.receive, [True]

        def damaged(delivery: Delivery) -> None:
            if delivery.transfer in layout.windows[1] and fails:
                fails.clear()
                raise SyncError("lost power")
            take(delivery)

        server.receiver.receive = damaged
        with pytest.raises(SyncError, match="lost power"):
            await asyncio.wait_for(sync_ranks(ranks, weights_of(), 0), 60)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        for rank in ranks:
            if rank.engine is not None:
                rank.engine.reached.clear()
                rank.engine.events.clear()
        await asyncio.wait_for(sync_ranks(ranks, weights_of(), 0, "again"), 60)
        assert server.holds(weights_of())

    ranks = _ranks(kind, layout)
    try:
        asyncio.run(main(ranks))
    finally:
        for rank in ranks:
            rank.transport.close()
