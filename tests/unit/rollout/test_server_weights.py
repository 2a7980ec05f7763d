"""A sync into a server that answers late: if it was cancelled meanwhile, it stays cancelled and waits for no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_sync import Trainer

from meshrl.core.errors import SyncError
from meshrl.rollout.server.weights import ServerWeights
from meshrl.sync.delivery import SlotAddress
from meshrl.sync.layout import SyncHeader, make_layout
from meshrl.sync.receiver import describe

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
    """One worker that accepts everything. It delays its answers to one step until `release` is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.late = ""
        self.release = asyncio.Event()

    async def call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append(step)
        if step == self.late:
            await self.release.wait()
        return [ANSWERS.get(step, {})]

    async def start_late(self, call: Awaitable[Any], step: str) -> asyncio.Future[Any]:
        """Start a call that waits for the server's late answer to this step; later calls of the step are answered."""
        self.late, num_calls = step, self.calls.count(step)
        running = asyncio.ensure_future(call)
        while self.calls.count(step) == num_calls:
            await asyncio.sleep(0)
        self.late = ""
        return running


async def sync(weights: ServerWeights, version: int) -> None:
    await weights.begin(header_of(version))
    await weights.receive(DELIVERY)
    ack = await weights.commit()
    assert (ack.version, ack.num_bytes) == (version, DELIVERY.num_bytes)


Step = Callable[[ServerWeights], Awaitable[Any]]
STEPS: dict[str, tuple[list[Step], Step]] = {  # -> steps before it, the step with the late answer
    "begin": ([], lambda w: w.begin(header_of(1))),
    "receive": ([lambda w: w.begin(header_of(1))], lambda w: w.receive(DELIVERY)),
    "commit": ([lambda w: w.begin(header_of(1)), lambda w: w.receive(DELIVERY)], lambda w: w.commit()),
}


@asynccontextmanager
async def late_at(step: str) -> AsyncIterator[tuple[ServerWeights, Server, asyncio.Future[Any]]]:
    """Version 0 is in place, and a sync of version 1 waits for the answer to this step."""
    server = Server()
    weights = ServerWeights(server.call, "w")
    try:
        await weights.reconcile(LAYOUT)
        await sync(weights, 0)
        before, last = STEPS[step]
        for one in before:
            await one(weights)
        yield weights, server, await server.start_late(last(weights), step)
    finally:
        weights.close()


async def check_later_steps_are_refused(weights: ServerWeights) -> None:
    for step in (lambda: weights.receive(DELIVERY), weights.commit):
        with pytest.raises(SyncError, match=r"is not allowed while the weights are (invalid|incomplete)"):
            await step()


@pytest.mark.parametrize("step", STEPS)
async def test_an_answer_after_the_cancel_does_not_resume_the_sync(step):
    """The cancel does not wait for that answer. A commit that succeeded too late leaves no version."""
    async with late_at(step) as (weights, server, running):
        await weights.cancel()
        assert not running.done() and server.calls[-1] == "cancel"
        server.release.set()
        with pytest.raises(SyncError, match="cancelled while its server was still at work"):
            await running
        assert (weights.state.version, weights.state.expected) == (-1, -1)
        await check_later_steps_are_refused(weights)
        for version in (0, 1):  # the last committed version may be sent again
            await sync(weights, version)
            assert weights.state.version == version


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancel_takes_effect_before_the_server_has_received_it(step):
    async with late_at(step) as (weights, server, running):
        cancel = await server.start_late(weights.cancel(), "cancel")
        assert (weights.state.version, weights.state.expected) == (-1, -1)
        await check_later_steps_are_refused(weights)
        server.release.set()
        with pytest.raises(SyncError, match="was cancelled"):
            await running
        await cancel


@pytest.mark.parametrize("step", STEPS)
async def test_a_late_answer_to_a_cancelled_sync_does_not_affect_the_next_one(step):
    """The next sync has the same version and an equal header: a late answer must not count as an answer to it."""
    async with late_at(step) as (weights, server, running):
        await weights.cancel()
        again = header_of(1)
        assert again == header_of(1)
        late, server.release = server.release, asyncio.Event()
        begun = await server.start_late(weights.begin(again), "begin")
        late.set()
        with pytest.raises(SyncError, match="was cancelled"):
            await running
        assert (weights.state.version, weights.state.expected) == (-1, 1)
        await check_later_steps_are_refused(weights)  # it has not begun yet
        server.release.set()
        await begun
        await weights.receive(DELIVERY)
        assert (await weights.commit()).version == weights.state.version == 1


@pytest.mark.parametrize(
    ("step", "answer", "fault"),
    [
        ("begin", {"error": "begin failed"}, "begin failed"),
        ("receive", {"error": "another digest"}, "another digest"),
        ("commit", {**ANSWERS["commit"], "differing": ["b has the values of version 0"]}, "b has the values"),
        ("reconcile", {**ANSWERS["reconcile"], "hidden": ["b"]}, None),
    ],
)
async def test_every_worker_of_a_server_must_prove_its_shard(step, answer, fault):
    """The first of two tensor-parallel workers is in order. hidden: a tensor that this worker can't read back."""

    async def call(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        good = ANSWERS.get(name, {})
        return [good, answer if name == step else good]

    weights = ServerWeights(call, "w")
    await weights.reconcile(LAYOUT)
    if fault is None:
        await weights.begin(header_of(0))
        await weights.receive(DELIVERY)
        ack = await weights.commit()
        assert (ack.wire, ack.read_back) == (True, None)
    else:
        with pytest.raises(SyncError, match=fault):
            await sync(weights, 0)
        assert weights.state.version == -1
    weights.close()


async def test_the_server_reads_transfers_where_they_are_and_gets_one_call_for_all_of_them():
    """Only those that other processes can't open are copied."""
    calls: list[list[dict[str, Any]]] = []

    async def call(step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        calls.extend([arguments["transfers"]] if step == "receive" else [])
        return [ANSWERS.get(step, {})]

    weights = ServerWeights(call, "w")
    await weights.reconcile(LAYOUT)
    address = SlotAddress(ring="of the sender", num_slots=3, slot_bytes=99, slot=2, at=16)
    for number, deliveries in enumerate([[replace(DELIVERY, slot_address=address)] * 2, [DELIVERY]]):
        await weights.begin(header_of(number))
        await weights.receive(*deliveries)
        await weights.commit()
    weights.close()
    (first, second), (copied,) = calls
    assert first == second and (first["ring"], first["slot"], first["at"]) == ("of the sender", 2, 16)
    assert copied["ring"] != "of the sender" and copied["facts"] == first["facts"]
