"""The contract of every transport, from the boxes of train ranks into engines: full syncs and deltas are exact to the
bit, and each injected fault is caught within the sync and named. A new transport is a row of
TRANSPORTS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import ask, tiny_engine
from tiny_models import tiny_lm
from tiny_sync import Rank, sync_ranks

from meshrl.core.errors import StaleWeightsError, SyncError, UnloadedParamsError
from meshrl.model.hub_names import HubNames
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.sync.collectives import AllGather, Broadcast
from meshrl.sync.delivery import Delivery, Transport
from meshrl.sync.layout import Box, Layout, Transfer, make_layout
from meshrl.sync.sender import WeightSender
from meshrl.sync.sockets import Sockets
from meshrl.train.weights import rank_weights

NUM_SENDERS, TRANSFER_BYTES = 2, 8192
GATHER_S = 6.0  # time limit of the other ranks for a rank that never connects
CPU = torch.device("cpu")
CONTEXT = list(range(10, 40))

Make = Callable[[Layout, int | None, int], Transport]
"""Make(layout, sender index or None, rank index) -> the transport of one rank."""


def one_machine(layout: Layout, num_ranks: int) -> Make:
    return lambda layout, sender, number: Sockets(layout, sender, "127.0.0.1", 0)


def machines(layout: Layout, num_ranks: int) -> Make:
    return lambda layout, sender, number: Sockets(layout, sender, "127.0.0.1", number)


def one_group(layout: Layout, num_ranks: int) -> Make:
    return lambda layout, sender, number: Broadcast(layout, sender, "127.0.0.1", CPU, GATHER_S)


def gathering(layout: Layout, num_ranks: int) -> Make:
    return lambda layout, sender, number: AllGather(layout, number, "127.0.0.1", CPU, GATHER_S, number == 0)


TRANSPORTS: dict[str, tuple[Callable[[Layout, int], Make], int]] = {  # -> and the number of separate sampler ranks
    "one machine, colocated": (one_machine, 0),
    "one machine, apart": (one_machine, 2),
    "machines, colocated": (machines, 0),
    "machines, apart": (machines, 2),
    "one group": (one_group, 2),
    "all-gather": (gathering, 0),
}


class Synced:
    """Train ranks with half of the rows of each tensor in fp32, their transports, and engines."""

    def __init__(self, transport: str):
        lm = tiny_lm("qwen2", tie_word_embeddings=True)
        self.masters = {name: p.detach().clone() for name, p in lm.named_parameters()}
        full = rank_weights(lm, HubNames(lm), torch.float32)
        halves: list[list[Box]] = [[], []]
        for name, (shape, _) in full.tensors.items():
            half, rest = -(-shape[0] // 2), (0,) * (len(shape) - 1)
            halves[0].append(Box(name, (0, *rest), (half, *shape[1:])))
            halves[1].append(Box(name, (half, *rest), (shape[0] - half, *shape[1:])))
        self.layout = make_layout(full.tensors, halves, full.tied, TRANSFER_BYTES)
        kind, num_samplers = TRANSPORTS[transport]
        make = kind(self.layout, NUM_SENDERS + num_samplers)
        self.ranks = []
        for number in range(NUM_SENDERS + num_samplers):
            sender = WeightSender(self.layout, number, keep_base=True) if number < NUM_SENDERS else None
            engine = tiny_engine(lm, trusted=False) if sender is None or not num_samplers else None
            end = make(self.layout, None if sender is None else number, number)
            self.ranks.append(Rank(self.layout, end, sender, engine))
        self.engines: list[EmbeddedEngine] = [r.engine for r in self.ranks if r.engine is not None]

    async def reconcile(self) -> None:
        for engine in self.engines:
            await engine.reconcile(self.layout)

    def train(self, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        for p in self.masters.values():
            p += 0.3 * (torch.rand(p.shape, generator=numbers) < 0.05)

    async def sync(self, version: int, connection_id: str = "first", ranks: list[Rank] | None = None) -> list[Any]:
        return await sync_ranks(self.ranks if ranks is None else ranks, self.masters, version, connection_id)

    async def check(self, version: int, engines: list[EmbeddedEngine] | None = None) -> None:
        """The engines compute with the masters, and answer like a new engine with the same weights."""
        for engine in self.engines if engines is None else engines:
            held = dict(engine._weights.lm.named_parameters())
            assert all(torch.equal(held[name], p) for name, p in self.masters.items())
            turn = await engine.generate(ask(f"{version}", CONTEXT))
            again = await tiny_engine(engine._weights.lm).generate(ask("cold", CONTEXT))
            assert turn.output_ids.tolist() == again.output_ids.tolist() and set(turn.versions) == {version}
            np.testing.assert_allclose(turn.logprobs, again.logprobs, atol=1e-6)


@contextmanager
def synced(transport: str) -> Iterator[Synced]:
    made = Synced(transport)
    try:
        yield made
    finally:
        for rank in made.ranks:
            rank.transport.close()


def go(main: Any) -> None:
    """Run a test within a deadline, with enough threads for the blocking waits of all ranks in this one process."""

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))
        await asyncio.wait_for(main, 60)

    asyncio.run(run())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_full_sync_and_then_deltas_are_exact_to_the_bit(transport):
    async def main(made: Synced) -> None:
        await made.reconcile()
        sizes = []
        for version in range(3):
            made.train(version)
            acks = await made.sync(version)
            assert {(ack.version, ack.wire, ack.read_back) for ack in acks} == {(version, True, True)}
            sizes.append(acks[0].num_bytes)
            await made.check(version)
        assert len(acks) == 2 and max(sizes[1:]) < sizes[0] / 3

    with synced(transport) as made:
        go(main(made))


class Faulty(WeightSender):
    """Its third transfer is faulty."""

    change: Callable[[Delivery, list[Delivery]], Delivery]

    def fill(self, transfer: Transfer, buffer: torch.Tensor) -> Delivery:
        delivery = super().fill(transfer, buffer)
        if transfer.index == 0:
            self.before = []
        self.before.append(delivery)
        return self.change(delivery, self.before) if transfer.index == 2 else delivery


def flip_a_bit(delivery: Delivery, before: list[Delivery]) -> Delivery:
    delivery.payload[4] ^= 1
    return delivery


def scramble(delivery: Delivery, before: list[Delivery]) -> Delivery:
    delivery.payload.copy_(delivery.payload.flip(0))
    return delivery


def end_early(delivery: Delivery, before: list[Delivery]) -> Delivery:
    raise SyncError("the train rank has ended")


FAULTS: dict[str, tuple[Any, str]] = {  # -> change of the transfer, expected error
    "digests of another": (
        lambda d, before: replace(d, digests=before[0].digests[:1] * len(d.digests)),
        r"transfer \d+ of sender 0 .*: model\.|model.* has digest",
    ),
    "a bit flipped": (flip_a_bit, r"transfer \d+ of sender 0 .*was sent with digest"),
    "scrambled": (scramble, r"transfer \d+ of sender 0 .*was sent with digest"),
    "cut short": (lambda d, _: replace(d, payload=d.payload[:-16]), r"\[\d+\] torch.uint8, expected|was expected"),
    "sender ends half-way": (end_early, "the train rank has ended"),
}


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_fault_in_transit_is_caught_and_the_next_full_sync_repairs_it(transport, fault, mode):
    """The error names the tensor or the stage, and nothing is sampled with the mixed weights."""
    change, complaint = FAULTS[fault]

    async def main(made: Synced) -> None:
        await made.reconcile()
        await made.sync(0)
        made.train(1)
        if mode == "full":
            await made.engines[0].cancel()
        sender = made.ranks[0].sender
        sender.__class__, sender.change = Faulty, change
        with pytest.raises(SyncError, match=complaint):
            await made.sync(1)
        for engine in made.engines:
            with pytest.raises(StaleWeightsError):
                await engine.generate(ask("a", CONTEXT))
        sender.__class__ = WeightSender
        await made.sync(1, "after an error")
        await made.check(1)

    with synced(transport) as made:
        go(main(made))


@pytest.mark.parametrize("transport", [name for name, (_, samplers) in TRANSPORTS.items() if samplers])
def test_a_sampler_that_never_connects_is_left_out_of_the_next_sync(transport):
    """The senders wait for it until the sync is cancelled; then the others get everything."""

    async def main(made: Synced) -> None:
        await made.reconcile()
        lost = made.ranks[-1]
        lost.sync = _never
        absent = asyncio.ensure_future(made.sync(0))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not absent.done()
        absent.cancel()
        await asyncio.gather(absent, return_exceptions=True)
        await made.sync(0, "without the lost one", made.ranks[:-1])
        await made.check(0, made.engines[:-1])
        del lost.sync
        await made.sync(1, "with the lost one")
        await made.check(1)

    with synced(transport) as made:
        go(main(made))


async def _never(order: Any, weights: Any) -> None:
    await asyncio.Event().wait()


def test_an_engine_with_other_tensors_than_at_reconcile_gets_all_of_them_or_an_error():
    """A head that is not tied any more, a replaced parameter, and a parameter with another dtype."""

    async def main(made: Synced) -> None:
        await made.reconcile()
        lm = made.engines[0]._weights.lm
        await made.sync(0)
        made.train(1)
        lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.clone(), requires_grad=False)
        norm = lm.model.layers[1].input_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
        await made.sync(1)
        await made.check(1)
        assert torch.equal(lm.lm_head.weight, made.masters["model.embed_tokens.weight"])
        norm.weight = torch.nn.Parameter(norm.weight.bfloat16(), requires_grad=False)
        with pytest.raises(UnloadedParamsError, match=r"input_layernorm.weight: sent \[32\] float32, the receiver has"):
            await made.sync(2)
        with pytest.raises(StaleWeightsError):
            await made.engines[0].generate(ask("a", CONTEXT))

    with synced("one machine, apart") as made:
        go(main(made))


def test_an_engine_that_lost_its_base_gets_everything():
    """After a release there is no version, so the next sync is a full sync."""

    async def main(made: Synced) -> None:
        await made.reconcile()
        await made.sync(0)
        await made.engines[0].release({"weights"})
        await made.engines[0].restore({"weights"})
        made.train(1)
        (full, _) = await made.sync(1)
        assert full.num_bytes >= sum(p.nbytes for p in made.masters.values())
        await made.check(1)

    with synced("one machine, apart") as made:
        go(main(made))
