"""What every way of weights owes, from a train rank's shards into an engine: all of it to the bit, changes alone too,
and each injected fault caught within the sync and named (P15, P17). A new transport is a new row of TRANSPORTS."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import ask, tiny_engine
from tiny_models import tiny_lm

from meshrl.core.errors import RankFailure, StaleWeightsError, SyncError
from meshrl.model.hub_names import tied_names
from meshrl.sync.file_ring import FileRing, FileRingView
from meshrl.sync.group_ring import GroupRing, GroupView, Seat
from meshrl.sync.manifest import Layout, make_layout
from meshrl.sync.receive import Bucket, describe
from meshrl.sync.remote_ring import RemoteRingView, RingServer
from meshrl.sync.send import make_header, send_weights
from meshrl.sync.shards import ShardSender
from meshrl.sync.transport import RingReceiver, SharedRing, SharedRingView

BUCKET_BYTES, NUM_SHARDS = 4096, 2
GATHER_S = 6.0  # who waits for one that never comes does so for as long
CPU = torch.device("cpu")
CONTEXT = list(range(10, 40))


class InProcess:
    """Buckets handed over as they are."""

    def __init__(self, layout: Layout, engine: Any):
        size = layout.staging_bytes
        self.staging = [[torch.empty(size, dtype=torch.uint8) for _ in range(2)] for _ in range(NUM_SHARDS)]
        self.receiver = engine

    def close(self) -> None:
        pass


class SharedMemory:
    """A ring for each shard, read by the engine's process; what is sent are descriptions."""

    def __init__(self, layout: Layout, engine: Any):
        self.layout, self.rings = layout, self.made(layout)
        self.staging = [ring.slots for ring in self.rings]
        self.views = self.opened(layout)

        async def call(method: str, argument: Any) -> Any:
            return await self.called(engine, method, argument)

        links = [RingReceiver(ring, call) for ring in self.rings]

        class Receiver(RingReceiver):
            async def receive(self, bucket: Bucket) -> None:
                await links[bucket.stream].receive(bucket)

        self.receiver = Receiver(self.rings[0], call)

    def made(self, layout: Layout) -> list[Any]:
        return [SharedRing(2, layout.staging_bytes) for _ in range(NUM_SHARDS)]

    def opened(self, layout: Layout) -> list[Any]:
        return [SharedRingView(ring.name, 2, layout.staging_bytes) for ring in self.rings]

    async def called(self, engine: Any, method: str, argument: Any) -> Any:
        if method == "receive":
            return await engine.receive(self.views[argument.stream].bucket(argument))
        return await getattr(engine, method)(*([] if argument is None else [argument]))

    def close(self) -> None:
        for held in (*self.views, *self.rings):
            held.close()


class AnotherMachine(SharedMemory):
    """The same rings, read over TCP."""

    def opened(self, layout: Layout) -> list[Any]:
        self.servers = [RingServer(ring, "127.0.0.1") for ring in self.rings]
        return [RemoteRingView(server.name, layout.staging_bytes) for server in self.servers]

    def close(self) -> None:
        super().close()
        for server in self.servers:
            server.close()


class ByFiles(SharedMemory):
    """A file for each bucket, in a folder that both sides see."""

    def made(self, layout: Layout) -> list[Any]:
        self.folder = tempfile.TemporaryDirectory()
        return [FileRing(2, layout.staging_bytes, Path(self.folder.name) / "weights") for _ in range(NUM_SHARDS)]

    def opened(self, layout: Layout) -> list[Any]:
        return [FileRingView(ring.name, layout.staging_bytes) for ring in self.rings]

    def close(self) -> None:
        super().close()
        assert not list(Path(self.folder.name).rglob("*_*/*")), "files are left"
        self.folder.cleanup()


class ByBroadcast(SharedMemory):
    """A process group of each sender and its receivers; a sync that broke off ends it."""

    def made(self, layout: Layout) -> list[Any]:
        return [GroupRing(2, layout.staging_bytes, CPU, "127.0.0.1", 20.0) for _ in range(NUM_SHARDS)]

    def opened(self, layout: Layout) -> list[Any]:
        self.num_groups = getattr(self, "num_groups", 0) + 1
        for ring in self.rings:
            ring.gather(f"occasion {self.num_groups}", 1)
        return [GroupView(ring.name, layout.staging_bytes, Seat(0, 1), CPU, 20.0) for ring in self.rings]

    async def called(self, engine: Any, method: str, argument: Any) -> Any:
        if method == "cancel":
            for view in self.views:
                view.close()
            self.views = self.opened(self.layout)
        return await super().called(engine, method, argument)


TRANSPORTS = {
    "in process": InProcess,
    "shared memory": SharedMemory,
    "another machine": AnotherMachine,
    "files": ByFiles,
    "broadcast": ByBroadcast,
}


class Pair:
    """A trainer of two shards with fp32 masters, a transport, and an engine."""

    def __init__(self, transport: Any, lm: torch.nn.Module):
        self.masters = {name: p.detach().clone() for name, p in lm.named_parameters()}
        self.engine = tiny_engine(lm, trusted=False)
        specs = describe(dict(lm.named_parameters()))
        tensors = [(name, *spec) for name, spec in specs.items()]
        self.layout = make_layout(tensors, tied_names(lm), BUCKET_BYTES, NUM_SHARDS, "xxh3")
        self.transport = transport(self.layout, self.engine)
        self.senders = [ShardSender(self.layout, s, self.transport.staging[s], True) for s in range(NUM_SHARDS)]

    def train(self, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        for p in self.masters.values():
            p += 0.3 * (torch.rand(p.shape, generator=numbers) < 0.05)

    async def sync(self, version: int, base: int | None = None, fault: Any = None) -> Any:
        header = make_header(self.layout, version, None, base, "full" if base is None else "delta")
        buckets: Iterator[Bucket] = self._buckets(version, base is not None)
        (ack,) = await send_weights(header, buckets if fault is None else fault(buckets), [self.transport.receiver])
        return ack

    def _buckets(self, version: int, delta: bool) -> Iterator[Bucket]:
        for s, sender in enumerate(self.senders):
            rows = {name: -(-p.shape[0] // NUM_SHARDS) for name, p in self.masters.items()}
            shard = {name: p[rows[name] * s : rows[name] * (s + 1)] for name, p in self.masters.items()}
            yield from sender.buckets(shard, version, delta)

    async def check(self) -> None:
        """The engine computes with the masters."""
        held = dict(self.engine._weights.lm.named_parameters())
        assert all(torch.equal(held[name], p) for name, p in self.masters.items())


@contextmanager
def paired(name: str) -> Iterator[Pair]:
    pair = Pair(TRANSPORTS[name], tiny_lm("qwen2", tie_word_embeddings=True))
    try:
        yield pair
    finally:
        pair.transport.close()


def go(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_of_it_and_then_changes_alone_arrive_to_the_bit(transport):
    """P17: and the same prompt answers as a cold engine of the same weights does."""

    async def main(pair):
        await pair.engine.reconcile(pair.layout)
        sizes = []
        for version in range(3):
            pair.train(version)
            ack = await pair.sync(version, base=version - 1 if version else None)
            assert (ack.version, ack.wire, ack.resident) == (version, True, True)
            sizes.append(ack.num_bytes)
            await pair.check()
            turn = await pair.engine.generate(ask(f"a{version}", CONTEXT))
            cold = tiny_engine(pair.engine._weights.lm)
            again = await cold.generate(ask("a", CONTEXT))
            assert turn.output_ids.tolist() == again.output_ids.tolist() and set(turn.versions) == {version}
            np.testing.assert_allclose(turn.logprobs, again.logprobs, atol=1e-6)
        assert max(sizes[1:]) < sizes[0] / 3

    with paired(transport) as pair:
        go(main(pair))


def bucket_two(change: Any) -> Any:
    """Do something to bucket 2 of the first shard alone."""

    def fault(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in buckets:
            yield from change(bucket) if (bucket.stream, bucket.index) == (0, 2) else [bucket]

    return fault


def turn_a_bit(bucket: Bucket) -> list[Bucket]:
    bucket.payload[4] ^= 1
    return [bucket]


def swap_with_the_next(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    """Two buckets in each other's slot: the payload of one under the name of the other."""
    for bucket in buckets:
        if bucket.index == 2:
            bucket.payload.copy_(bucket.payload.flip(0))
        yield bucket


def lose_power(bucket: Bucket) -> list[Bucket]:
    raise ConnectionError("the train rank has ended")


FAULTS = {  # -> (what happens, what the error says)
    "dropped": (bucket_two(lambda b: []), "bucket 3 came out of order; expected bucket 2"),
    "last one dropped": (lambda buckets: [b for b in [replace(b) for b in buckets]][:0], "commit after 0 of"),
    "duplicated": (bucket_two(lambda b: [b, b]), "bucket 2 came twice"),
    "of the other shard": (
        bucket_two(lambda b: [replace(b, stream=1)]),
        "bucket 2 (came out of order|does not lie in)",
    ),
    "a bit turned": (bucket_two(turn_a_bit), r"bucket 2 (brought model\.|was sent with digest)"),
    "scrambled": (swap_with_the_next, r"bucket 2 (brought model\.|was sent with digest)"),
    "cut short": (bucket_two(lambda b: [replace(b, payload=b.payload[:-16])]), r"bucket 2 has \["),
    "digests of another": (bucket_two(lambda b: [replace(b, pieces=b.pieces[1:])]), "speaks of"),
    "sender gone half-way": (bucket_two(lose_power), "ConnectionError: the train rank has ended"),
}


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_fault_on_the_way_is_caught_and_the_next_full_sync_heals_it(transport, fault, mode):
    """P15: the error names the tensor or the stage, and nothing is sampled with what was left behind."""
    what, complaint = FAULTS[fault]

    async def main(pair):
        await pair.engine.reconcile(pair.layout)
        await pair.sync(0)
        pair.train(1)
        with pytest.raises(SyncError, match=complaint):
            await pair.sync(1, base=0 if mode == "delta" else None, fault=what)
        with pytest.raises(StaleWeightsError):
            await pair.engine.generate(ask("a", CONTEXT))
        await pair.sync(1)
        await pair.check()
        assert set((await pair.engine.generate(ask("a", CONTEXT))).versions) == {1}

    with paired(transport) as pair:
        go(main(pair))


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_what_the_engine_did_not_load_is_named(mode):
    """P11, P15: a head that is not tied any more, a layer that was skipped, one of another dtype."""

    async def main(pair):
        await pair.engine.reconcile(pair.layout)
        lm = pair.engine._weights.lm
        base = None if mode == "full" else 0
        await pair.sync(0)
        pair.train(1)
        lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.clone(), requires_grad=False)
        with pytest.raises(SyncError, match=r"lm_head.weight \(tied to .*still has the values of version 0"):
            await pair.sync(1, base=base)
        lm.lm_head.weight = lm.model.embed_tokens.weight
        await pair.sync(1)
        pair.train(2)
        norm = lm.model.layers[1].input_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
        with pytest.raises(SyncError, match=r"model.layers.1.input_layernorm.weight still has the values of version 1"):
            await pair.sync(2, base=None if base is None else 1)
        norm.weight = torch.nn.Parameter(norm.weight.bfloat16(), requires_grad=False)
        with pytest.raises(SyncError, match=r"input_layernorm.weight is \[.*\] bfloat16, sent as"):
            await pair.sync(2)
        with pytest.raises(StaleWeightsError):
            await pair.engine.generate(ask("a", CONTEXT))

    with paired("in process") as pair:
        go(main(pair))


def test_a_delta_to_who_lost_the_base_is_refused():
    """P15: also between begin and commit of a release, which leaves no version."""

    async def main(pair):
        await pair.engine.reconcile(pair.layout)
        await pair.sync(0)
        await pair.engine.release({"weights"})
        await pair.engine.restore({"weights"})
        with pytest.raises(SyncError, match="delta on base version 0 came, but version -1 is in place"):
            await pair.sync(1, base=0)
        await pair.sync(1)
        await pair.check()

    with paired("in process") as pair:
        go(main(pair))


class Listener:
    """A receiver of a broadcast, whose waits are in a thread as another process's are in it."""

    def __init__(self, rings: list[GroupRing], layout: Layout, seat: Seat, lm: torch.nn.Module):
        self.rings, self.slot_bytes, self.seat = rings, layout.staging_bytes, seat
        self.engine, self.views = tiny_engine(lm, trusted=False), list[GroupView]()

    def _join(self) -> None:
        for ring in self.rings if not self.views else ():
            self.views.append(GroupView(ring.name, self.slot_bytes, self.seat, CPU, GATHER_S))

    async def begin(self, header: Any) -> None:
        await asyncio.to_thread(self._join)
        await self.engine.begin(header)

    async def receive(self, ref: Any) -> None:
        await self.engine.receive(await asyncio.to_thread(self.views[ref.stream].bucket, ref))

    async def commit(self) -> Any:
        return await self.engine.commit()

    async def cancel(self) -> None:
        while self.views:
            self.views.pop().close()
        await self.engine.cancel()


class Lost(Listener):
    """It never comes to where the others gather."""

    async def begin(self, header: Any) -> None:
        raise RankFailure(7, "sync", "its process was killed by SIGKILL")


class Broadcast(InProcess):
    """The senders' ends, and listeners that share them."""

    def __init__(self, layout: Layout, engine: Any):
        self.rings = [GroupRing(2, layout.staging_bytes, CPU, "127.0.0.1", GATHER_S) for _ in range(NUM_SHARDS)]
        self.staging = [ring.slots for ring in self.rings]

    def close(self) -> None:
        for ring in self.rings:
            ring.close()


@contextmanager
def broadcasting(*kinds: type[Listener]) -> Iterator[tuple[Pair, list[Listener], Any]]:
    """A pair's senders, a listener of each kind, and how to send to listeners: a version, the base of a delta or None,
    and the occasion at which they gather."""
    lm = tiny_lm("qwen2", tie_word_embeddings=True)
    pair = Pair(Broadcast, lm)
    rings, layout = pair.transport.rings, pair.layout
    listeners = [kind(rings, layout, Seat(i, len(kinds)), lm) for i, kind in enumerate(kinds)]

    async def send(to: list[Listener], version: int, base: int | None, occasion: str) -> Any:
        for ring in rings:
            ring.gather(occasion, len(to))
        header = make_header(layout, version, None, base, "full" if base is None else "delta")
        refs = (rings[bucket.stream].ref(bucket) for bucket in pair._buckets(version, base is not None))
        return await send_weights(header, refs, to)

    try:
        yield pair, listeners, send
    finally:
        for view in (view for listener in listeners for view in listener.views):
            view.close()
        pair.transport.close()


async def _all_hold(pair: Pair, listeners: list[Listener], version: int) -> None:
    for listener in listeners:
        held = dict(listener.engine._weights.lm.named_parameters())
        assert held.keys() == pair.masters.keys()
        assert all(torch.equal(held[name], p) for name, p in pair.masters.items())
        assert set((await listener.engine.generate(ask(f"{version}", CONTEXT))).versions) == {version}


def test_a_broadcast_leaves_equal_weights_in_three_receivers():
    """P17: all of it, then changes alone."""

    async def main(pair, listeners, send):
        for listener in listeners:
            await listener.engine.reconcile(pair.layout)
        for version in range(3):
            pair.train(version)
            acks = await send(listeners, version, version - 1 if version else None, "all three")
            assert [(ack.version, ack.wire, ack.resident) for ack in acks] == [(version, True, True)] * 3
            await _all_hold(pair, listeners, version)

    with broadcasting(Listener, Listener, Listener) as parts:
        go(main(*parts))


def test_a_receiver_that_never_comes_is_named_and_the_others_gather_without_it():
    """P26: they wait for it in vain and fail first, but it is to blame. What is sent next reaches all of them."""

    async def main(pair, listeners, send):
        for listener in listeners:
            await listener.engine.reconcile(pair.layout)
        with pytest.raises(SyncError, match="receiver 1 failed at begin: RankFailure: rank 7") as error:
            await send(listeners, 0, None, "all three")
        assert isinstance(error.value.__cause__, RankFailure)
        here = [listeners[0], listeners[2]]
        for number, listener in enumerate(here):
            with pytest.raises(StaleWeightsError):
                await listener.engine.generate(ask("a", CONTEXT))
            listener.seat = Seat(number, len(here))
        await send(here, 0, None, "two of them")
        await _all_hold(pair, here, 0)

    with broadcasting(Listener, Lost, Listener) as parts:
        go(main(*parts))
