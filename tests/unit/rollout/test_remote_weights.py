"""A sync into a server that answers late: what was given up meanwhile stays so, and waits for no answer (P15)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from meshrl.core.errors import SyncError
from meshrl.rollout.foreign.weights import RemoteWeights
from meshrl.sync.digest import digest
from meshrl.sync.manifest import SyncHeader, make_layout
from meshrl.sync.receive import describe
from meshrl.sync.send import iter_buckets, make_header

TENSORS = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
LAYOUT = make_layout([(name, *spec) for name, spec in describe(TENSORS).items()], bucket_bytes=1 << 20)
(BUCKET,) = iter_buckets(LAYOUT, TENSORS.items())
ANSWERS: dict[str, dict[str, Any]] = {
    "meshrl_reconcile": {"hidden": [], "refused": {}, "unfilled": {}, "dtypes": dict.fromkeys(TENSORS, "float32")},
    "meshrl_commit": {"differing": [], "seconds": {"load": 0.0, "verify": 0.0}},
}


def header_of(version: int) -> SyncHeader:
    return make_header(LAYOUT, version, {name: digest(tensor) for name, tensor in TENSORS.items()})


class Server:
    """One worker that takes whatever it is sent. It keeps back its answers to one method until `release` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.late = ""
        self.release = asyncio.Event()

    async def call(self, method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append(method)
        if method == self.late:
            await self.release.wait()
        return [ANSWERS.get(method, {})]

    async def begins_to_work(self, step: Awaitable[Any], method: str) -> asyncio.Future[Any]:
        """The step, under way and waiting for the server's late answer; later calls of the method are answered."""
        self.late, num_asked = method, self.asked.count(method)
        under_way = asyncio.ensure_future(step)
        while self.asked.count(method) == num_asked:
            await asyncio.sleep(0)
        self.late = ""
        return under_way


async def sync(weights: RemoteWeights, version: int) -> None:
    await weights.begin(header_of(version))
    await weights.receive(BUCKET)
    assert (await weights.commit()).version == version


Step = Callable[[RemoteWeights], Awaitable[Any]]
STEPS: dict[str, tuple[list[Step], Step]] = {  # -> what comes before it, the step whose answer is late
    "begin": ([], lambda w: w.begin(header_of(1))),
    "receive": ([lambda w: w.begin(header_of(1))], lambda w: w.receive(BUCKET)),
    "commit": ([lambda w: w.begin(header_of(1)), lambda w: w.receive(BUCKET)], lambda w: w.commit()),
}


@asynccontextmanager
async def late_at(step: str) -> AsyncIterator[tuple[RemoteWeights, Server, asyncio.Future[Any]]]:
    """Version 0 in place, and a sync of version 1 whose server is at work on this step."""
    server = Server()
    weights = RemoteWeights(server.call, "w")
    try:
        await weights.reconcile(LAYOUT)
        await sync(weights, 0)
        before, last = STEPS[step]
        for one in before:
            await one(weights)
        yield weights, server, await server.begins_to_work(last(weights), f"meshrl_{step}")
    finally:
        weights.close()


def go(main: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


async def all_that_come_next_are_refused(weights: RemoteWeights) -> None:
    for step in (lambda: weights.receive(BUCKET), weights.commit):
        with pytest.raises(SyncError, match="came while the receiver was cancelled"):
            await step()


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_answered_after_the_cancel_does_not_take_the_sync_up_again(step):
    """Nor does the cancel wait for that answer. A commit that succeeded too late leaves no version."""

    async def main() -> None:
        async with late_at(step) as (weights, server, under_way):
            await weights.cancel()
            assert not under_way.done() and server.asked[-1] == "meshrl_cancel"
            server.release.set()
            with pytest.raises(SyncError, match="given up while its server was still at work"):
                await under_way
            assert (weights.version, weights.expected) == (-1, -1)
            await all_that_come_next_are_refused(weights)
            for version in (0, 1):  # the last that was committed may come again
                await sync(weights, version)
                assert weights.version == version

    go(main())


@pytest.mark.parametrize("step", STEPS)
def test_a_cancel_holds_before_the_server_has_heard_of_it(step):
    async def main() -> None:
        async with late_at(step) as (weights, server, under_way):
            cancel = await server.begins_to_work(weights.cancel(), "meshrl_cancel")
            assert (weights.version, weights.expected) == (-1, -1)
            await all_that_come_next_are_refused(weights)
            server.release.set()
            with pytest.raises(SyncError, match="given up"):
                await under_way
            await cancel

    go(main())


@pytest.mark.parametrize("step", STEPS)
def test_an_answer_to_a_sync_that_was_given_up_leaves_the_next_one_as_it_is(step):
    """The next one brings the same version, by a header that is equal: who answers late must not pass for it."""

    async def main() -> None:
        async with late_at(step) as (weights, server, under_way):
            await weights.cancel()
            again = header_of(1)
            assert again == header_of(1)
            late, server.release = server.release, asyncio.Event()
            begun = await server.begins_to_work(weights.begin(again), "meshrl_begin")
            late.set()
            with pytest.raises(SyncError, match="given up"):
                await under_way
            assert (weights.version, weights.expected) == (-1, 1)
            await all_that_come_next_are_refused(weights)  # it has not begun yet
            server.release.set()
            await begun
            await weights.receive(BUCKET)
            assert (await weights.commit()).version == weights.version == 1

    go(main())
