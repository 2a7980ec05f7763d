"""A sync into a server that answers late: one that was cancelled meanwhile stays so, and waits for no answer (P15)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tiny_sync import Trainer

from meshrl.core.errors import SyncError
from meshrl.rollout.foreign.weights import ServerWeights
from meshrl.sync.layout import SyncHeader, make_layout
from meshrl.sync.reconcile import describe

TENSORS = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
LAYOUT = make_layout(describe(TENSORS), transfer_bytes=1 << 20)
(DELIVERY,) = Trainer(LAYOUT, keep_base=False).deliveries(TENSORS)
ANSWERS: dict[str, dict[str, Any]] = {
    "reconcile": {"hidden": [], "refused": {}, "unfilled": {}, "dtypes": dict.fromkeys(TENSORS, "float32")},
    "commit": {"differing": [], "seconds": {"load": 0.0, "verify": 0.0}},
}


def header_of(version: int) -> SyncHeader:
    return SyncHeader(version=version, layout_hash=LAYOUT.hash)


class Server:
    """One worker that takes whatever it is sent. It keeps back its answers to one step until `release` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.late = ""
        self.release = asyncio.Event()

    async def call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append(step)
        if step == self.late:
            await self.release.wait()
        return [ANSWERS.get(step, {})]

    async def begins_to_work(self, work: Awaitable[Any], step: str) -> asyncio.Future[Any]:
        """The work, under way and waiting for the server's late answer; later calls of the step are answered."""
        self.late, num_asked = step, self.asked.count(step)
        under_way = asyncio.ensure_future(work)
        while self.asked.count(step) == num_asked:
            await asyncio.sleep(0)
        self.late = ""
        return under_way


async def sync(weights: ServerWeights, version: int) -> None:
    await weights.begin(header_of(version))
    await weights.receive(DELIVERY)
    assert (await weights.commit()).version == version


Step = Callable[[ServerWeights], Awaitable[Any]]
STEPS: dict[str, tuple[list[Step], Step]] = {  # -> what comes before it, the step whose answer is late
    "begin": ([], lambda w: w.begin(header_of(1))),
    "receive": ([lambda w: w.begin(header_of(1))], lambda w: w.receive(DELIVERY)),
    "commit": ([lambda w: w.begin(header_of(1)), lambda w: w.receive(DELIVERY)], lambda w: w.commit()),
}


@asynccontextmanager
async def late_at(step: str) -> AsyncIterator[tuple[ServerWeights, Server, asyncio.Future[Any]]]:
    """Version 0 in place, and a sync of version 1 whose server is at work on this step."""
    server = Server()
    weights = ServerWeights(server.call, "w")
    try:
        await weights.reconcile(LAYOUT)
        await sync(weights, 0)
        before, last = STEPS[step]
        for one in before:
            await one(weights)
        yield weights, server, await server.begins_to_work(last(weights), step)
    finally:
        weights.close()


def go(main: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


async def all_that_come_next_are_refused(weights: ServerWeights) -> None:
    for step in (lambda: weights.receive(DELIVERY), weights.commit):
        with pytest.raises(SyncError, match="came while the receiver was cancelled"):
            await step()


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_answered_after_the_cancel_does_not_take_the_sync_up_again(step):
    """Nor does the cancel wait for that answer. A commit that succeeded too late leaves no version."""

    async def main() -> None:
        async with late_at(step) as (weights, server, under_way):
            await weights.cancel()
            assert not under_way.done() and server.asked[-1] == "cancel"
            server.release.set()
            with pytest.raises(SyncError, match="cancelled while its server was still at work"):
                await under_way
            assert (weights.version, weights.expected) == (-1, -1)
            await all_that_come_next_are_refused(weights)
            for version in (0, 1):  # the last that was committed may come again
                await sync(weights, version)
                assert weights.version == version

    go(main())


@pytest.mark.parametrize("step", STEPS)
def test_a_cancel_holds_before_the_server_has_received_it(step):
    async def main() -> None:
        async with late_at(step) as (weights, server, under_way):
            cancel = await server.begins_to_work(weights.cancel(), "cancel")
            assert (weights.version, weights.expected) == (-1, -1)
            await all_that_come_next_are_refused(weights)
            server.release.set()
            with pytest.raises(SyncError, match="was cancelled"):
                await under_way
            await cancel

    go(main())


@pytest.mark.parametrize("step", STEPS)
def test_an_answer_to_a_sync_that_was_cancelled_leaves_the_next_one_as_it_is(step):
    """The next one brings the same version, by a header that is equal: a late answer must not count as its own."""

    async def main() -> None:
        async with late_at(step) as (weights, server, under_way):
            await weights.cancel()
            again = header_of(1)
            assert again == header_of(1)
            late, server.release = server.release, asyncio.Event()
            begun = await server.begins_to_work(weights.begin(again), "begin")
            late.set()
            with pytest.raises(SyncError, match="was cancelled"):
                await under_way
            assert (weights.version, weights.expected) == (-1, 1)
            await all_that_come_next_are_refused(weights)  # it has not begun yet
            server.release.set()
            await begun
            await weights.receive(DELIVERY)
            assert (await weights.commit()).version == weights.version == 1

    go(main())
