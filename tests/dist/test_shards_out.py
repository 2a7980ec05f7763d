"""Each rank's shards into samplers, beside it and in other processes, without a gather (P15, P16)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import engine_over
from tiny_models import tiny_qwen2

from meshrl.model.hub_names import tied_names
from meshrl.model.load import cast_parameters
from meshrl.sync.manifest import Ack
from meshrl.sync.receive import Bucket, ReceiverState, describe, reconcile
from meshrl.sync.send import make_header, send_weights, with_reports
from meshrl.sync.shards import SendReport
from meshrl.sync.transport import SharedRingView
from meshrl.train.engine import TrainEngine
from meshrl.train.outgoing import RING_SLOTS, Outgoing, Transport

UNEVEN: dict[str, Any] = dict(  # no dim divides by 4; a dim of 5 leaves the last of four ranks empty
    vocab_size=61, hidden_size=30, intermediate_size=5, num_attention_heads=3, num_key_value_heads=1
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {},
    "NO_SHARD": {},
    "HYBRID_SHARD": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
}
NUM_SYNCS = 4


class Sampler:
    """A model of other values than the trainer's, read back under all its names."""

    def __init__(self, layout: Any, tie: bool = True):
        self.lm = cast_parameters(tiny_qwen2(tie=tie, seed=9, **UNEVEN), torch.bfloat16).requires_grad_(False)
        held = dict(self.lm.named_parameters())
        reconcile(layout, describe(held), tied_names(self.lm))
        self.state = ReceiverState(layout, held)

    async def begin(self, header: Any) -> None:
        self.state.begin(header)

    async def receive(self, bucket: Bucket) -> None:
        self.state.receive(bucket)

    async def commit(self) -> Ack:
        return self.state.commit(lambda: self.lm.named_parameters(remove_duplicate=False))

    async def cancel(self) -> None:
        self.state.cancel()


def _train(engine: TrainEngine, step: int) -> None:
    """Move a few masters by more than bf16 rounds, the same on every replica."""
    for number, shard in enumerate(engine.shards().values()):
        flat = shard.view(-1)
        flat[(step + number) % 17 :: 23] += 0.25


def _from_others(layout: Any, out: Outgoing, version: int, held: int) -> tuple[Any, Iterator[Bucket]]:
    """What samplers in other processes get: every rank's ring, read here."""
    sources: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sources, out.begin(layout, "first", 1))
    rings = {rank: source.ring for rank, source in enumerate(sources) if source.ring is not None}
    bases = {source.base_version for source in sources if source.ring is not None}
    delta = bases == {held} and held >= 0

    def buckets() -> Iterator[Bucket]:
        views = {rank: SharedRingView(ring, RING_SLOTS, layout.staging_bytes) for rank, ring in rings.items()}
        while True:
            refs: list[Any] = [None] * dist.get_world_size()
            sent = out.next(version, delta) if dist.get_rank() in rings else SendReport()
            dist.all_gather_object(refs, sent)
            if all(isinstance(ref, SendReport) for ref in refs):
                return
            for rank, ref in enumerate(refs):
                if not isinstance(ref, SendReport):
                    yield views[rank].bucket(ref)
            dist.barrier()

    return make_header(layout, version, None, held if delta else None, "delta" if delta else "full"), buckets()


def outgoing(engine: TrainEngine, keep_base: bool, one_machine: bool = True) -> Outgoing:
    facts = {"one_machine": one_machine, "address": "127.0.0.1", "timeout_s": 60.0}
    return Outgoing(engine, Transport(), keep_base=keep_base, **facts)


def _synced(
    rank: int, world: int, train: dict[str, Any], way: str, keep_base: bool, bucket_bytes: int, tie: bool = True
) -> list[tuple[bool, Ack]]:
    """Several syncs with training in between: whether the sampler then holds the gathered weights, and its ack."""
    engine = engine_over(tiny_qwen2(tie=tie, **UNEVEN), world, train, torch.bfloat16)
    engine.require_independent_rows()  # a forward without a backward must leave nothing whole behind
    layout = engine.layout(bucket_bytes)
    out = outgoing(engine, keep_base, one_machine=way != "collective")
    sampler, found = Sampler(layout, tie), []
    for version in range(NUM_SYNCS):
        _train(engine, version)
        if version == NUM_SYNCS - 1 and rank == 0:
            sampler.state.cancel()  # one of them has lost its weights: all get everything again
        held = sampler.state.version
        if way == "rings":
            least = torch.tensor(held)
            dist.all_reduce(least, dist.ReduceOp.MIN)  # what the controller does with the samplers' answers
            header, buckets = _from_others(layout, out, version, int(least))
        else:
            header, buckets = out.beside(layout, version, held, sampler.state.targets())
        (ack,) = asyncio.run(send_weights(header, buckets, [sampler]))
        if way != "rings":
            (ack,) = with_reports([ack], [out.report()])
        same = [torch.equal(sampler.lm.get_parameter(name), whole) for name, whole in engine.wire_weights()]
        tied = sampler.lm.lm_head.weight is sampler.lm.model.embed_tokens.weight
        found.append((all(same) and tied == tie, ack))
    dist.barrier()
    out.close()
    return found


def _check(answers: list[list[tuple[bool, Ack]]], changes_alone: bool) -> None:
    for found in answers:
        assert [holds for holds, _ in found] == [True] * NUM_SYNCS
        acks = [ack for _, ack in found]
        assert [(a.version, a.wire, a.resident) for a in acks] == [(v, True, True) for v in range(NUM_SYNCS)]
        sizes = [ack.num_bytes for ack in acks]
        fewer = [size < sizes[0] / 2 for size in sizes]
        assert fewer == [False, changes_alone, changes_alone, False]


@pytest.mark.parametrize("way", ["shared memory", "collective", "rings"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_samplers_hold_the_trainers_weights_to_the_bit_after_every_sync(pool, world, way):
    """P16: full, then changes alone, then full again by itself when one sampler has lost its version."""
    alone = world == 1 and way != "rings"  # written in place: there is nothing to save
    _check(pool.run(_synced, world, {}, way, True, 4096), changes_alone=not alone)


@pytest.mark.parametrize(("world", "way"), [(1, "shared memory"), (2, "shared memory"), (2, "rings")])
def test_a_head_that_is_not_tied_gets_weights_of_its_own(pool, world, way):
    """P11, P16: sent under its own name, and read back beside the embedding."""
    _check(pool.run(_synced, world, {}, way, True, 4096, False), changes_alone=world > 1)


@pytest.mark.parametrize("way", ["shared memory", "rings"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_sharding_strategy_sends_each_shard_once(pool, strategy, way):
    """P16: replicas of a shard are not sent twice, and every rank's sampler still gets everything."""
    train = {"sharding_strategy": strategy, **STRATEGIES[strategy]}
    alone = strategy == "NO_SHARD" and way != "rings"
    _check(pool.run(_synced, 4, train, way, True, 4096), changes_alone=not alone)


def test_nothing_is_remembered_unless_asked_for(pool):
    """P19: no copy of the weights, and so no changes."""
    answers = pool.run(_synced, 2, {}, "shared memory", False, 1 << 20)
    _check(answers, changes_alone=False)
    for found in answers:
        assert max(ack.extra_bytes for _, ack in found) <= 2 * (1 << 20) // 2


def _ten_syncs(rank: int, world: int, folder: str, way: str) -> list[str]:
    """AdamW steps between syncs, then an export; names that differ between the sampler and a fresh load of it."""
    from meshrl.model.load import load_causal_lm

    engine = engine_over(tiny_qwen2(**UNEVEN), world, {"optimizer": {"lr": 1e-3}}, torch.bfloat16)
    layout = engine.layout(4096)
    out, sampler = outgoing(engine, keep_base=True), Sampler(layout)
    for version in range(10):
        if version:
            torch.manual_seed(version)
            for p in engine.model.parameters():
                p.grad = torch.randn_like(p)
            engine.optim_step(1e-3)
        if way == "rings":
            header, buckets = _from_others(layout, out, version, sampler.state.version)
        else:
            header, buckets = out.beside(layout, version, sampler.state.version, sampler.state.targets())
        asyncio.run(send_weights(header, buckets, [sampler]))
    engine.export(folder)
    dist.barrier()
    out.close()
    fresh = cast_parameters(load_causal_lm(folder), torch.bfloat16)
    return [n for n, p in fresh.named_parameters() if not torch.equal(p, sampler.lm.get_parameter(n))]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["beside", "rings"])
@pytest.mark.parametrize("world", [1, 2])
def test_after_ten_syncs_with_training_in_between_a_sampler_is_a_fresh_load_of_the_export(pool, tmp_path, world, way):
    """P15, P16: changes of changes add up to exactly the weights."""
    assert pool.run(_ten_syncs, world, str(tmp_path), way) == [[]] * world


def _wrong(rank: int, world: int) -> str:
    """A bit of the other rank's shard turns on its way here."""
    from meshrl.core.errors import SyncError
    from meshrl.sync.exchange import Exchange

    engine = engine_over(tiny_qwen2(**UNEVEN), world, {}, torch.bfloat16)
    layout = engine.layout(4096)
    out, sampler = outgoing(engine, keep_base=False), Sampler(layout)
    payloads = Exchange._payloads

    def spoiled(self: Exchange, index: int, mine: Any) -> list[torch.Tensor]:
        found = payloads(self, index, mine)
        if index == 1 and rank == 0:
            found = [found[0], found[1].clone()]
            found[1][3] ^= 1
        return found

    Exchange._payloads = spoiled  # type: ignore[method-assign]
    try:
        header, buckets = out.beside(layout, 0, -1, sampler.state.targets())
        asyncio.run(send_weights(header, buckets, [sampler]))
        return "fine"
    except SyncError as error:
        list(buckets)  # the other rank stands in the collectives
        return str(error)
    finally:
        Exchange._payloads = payloads  # type: ignore[method-assign]
        dist.barrier()
        out.close()


def test_a_bit_that_turns_between_two_ranks_names_its_tensor(pool):
    """P15: digests are taken where the shard is, before it travels."""
    first, second = pool.run(_wrong, 2)
    assert second == "fine" and "bucket 1 brought model." in first and "sent was" in first
