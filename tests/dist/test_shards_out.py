"""Each rank's boxes to samplers, in the same process and in others, without a gather."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import STRATEGIES, engine_over
from synced_ranks import SyncedRank
from tiny_engines import tiny_engine
from tiny_models import tiny_lm, tiny_qwen2
from tiny_sync import receiver_of
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshrl.core.errors import SyncError
from meshrl.model.hub_names import HubNames
from meshrl.model.lora import named_weights
from meshrl.model.recipe import cast_parameters
from meshrl.parallel.fsdp import full_tensor, local_shard
from meshrl.sync.delivery import NUM_SLOTS, Delivery
from meshrl.sync.layout import Ack, Layout, SyncHeader, Transfer, make_layout
from meshrl.sync.sender import WeightSender
from meshrl.sync.sockets import Sockets
from meshrl.sync.transaction import SyncOrder, sync_rank
from meshrl.train.engine import TrainEngine
from meshrl.train.weights import rank_weights

UNEVEN: dict[str, Any] = dict(  # 4 divides no dim; with a dim of 5 the last of four ranks is empty
    vocab_size=61, hidden_size=30, intermediate_size=5, num_attention_heads=3, num_key_value_heads=1
)
NUM_SYNCS = 4
APART = ("sockets", "other machine", "broadcast")


def _synced_rank(engine: TrainEngine, way: str, tie: bool = True, **changes: Any) -> SyncedRank:
    """A rank with a sampler in bf16 that has other weights than the trainer."""
    other = tiny_qwen2(tie=tie, seed=9, **UNEVEN)
    sampler = tiny_engine(cast_parameters(other, torch.bfloat16), trusted=False)
    return SyncedRank(engine, sampler, way, **changes)


def _weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """All weights, gathered, in the sampler's dtype (a collective)."""
    return {name: full_tensor(p.detach()).to(engine.compute_dtype) for name, p in named_weights(engine.model.lm)}


def _train(engine: TrainEngine, step: int) -> None:
    """Change a few masters by more than bf16 rounding, equally on every replica."""
    for number, p in enumerate(engine.model.parameters()):
        flat = local_shard(p.detach()).view(-1)
        flat[(step + number) % 17 :: 23] += 0.25


def _synced(
    rank: int, world: int, train: dict[str, Any], way: str, mode: str = "delta", tie: bool = True
) -> tuple[list[tuple[bool, Ack]], Layout]:
    """Several syncs with training in between: whether the sampler has the gathered weights, and its ack."""
    engine = engine_over(tiny_qwen2(tie=tie, **UNEVEN), world, train, torch.bfloat16)
    engine.require_independent_rows()  # a forward without a backward must not leave gathered parameters behind
    synced, found = _synced_rank(engine, way, tie, mode=mode), []

    async def run() -> None:
        await synced.reconcile()
        for version in range(NUM_SYNCS):
            _train(engine, version)
            if version == NUM_SYNCS - 1 and rank == 0:
                await synced.sampler.cancel()  # one sampler has lost its weights: all get everything
            ack = await synced.sync(version)
            lm: Any = synced.sampler._weights.lm
            same = [torch.equal(lm.get_parameter(name), full) for name, full in _weights(engine).items()]
            tied = lm.lm_head.weight is lm.model.embed_tokens.weight
            found.append((all(same) and tied == tie, ack))

    asyncio.run(run())
    synced.close()
    return found, synced.layout


def _check(answers: list[tuple[list[tuple[bool, Ack]], Layout]], only_changes: bool) -> None:
    for found, _ in answers:
        assert [holds for holds, _ in found] == [True] * NUM_SYNCS
        acks = [ack for _, ack in found]
        assert [(a.version, a.wire, a.read_back) for a in acks] == [(v, True, True) for v in range(NUM_SYNCS)]
        sizes = [ack.num_bytes for ack in acks]
        fewer = [size < sizes[0] / 2 for size in sizes]
        assert fewer == [False, only_changes, only_changes, False]


@pytest.mark.parametrize("way", ["shared memory", "collective", *APART])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_after_every_sync_the_samplers_hold_the_trainers_weights_to_the_bit(pool, world, way):
    """Full, then only changes, then full again because one sampler has lost its version."""
    in_place = world == 1 and way not in APART  # written in place, without a delta
    _check(pool.run(_synced, world, {}, way), only_changes=not in_place)


@pytest.mark.parametrize(("world", "way"), [(1, "shared memory"), (2, "shared memory"), (2, "sockets")])
def test_an_untied_head_gets_its_own_weights(pool, world, way):
    """Sent under its own name, and read back separately from the embedding."""
    _check(pool.run(_synced, world, {}, way, "delta", False), only_changes=world > 1)


@pytest.mark.parametrize("way", ["shared memory", "collective", "sockets"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_sharding_strategy_sends_each_shard_once(pool, strategy, way):
    """A shard with replicas is sent once, and every rank's sampler gets everything."""
    train = {"sharding_strategy": strategy, **STRATEGIES[strategy]}
    in_place = strategy == "NO_SHARD" and way not in APART
    answers = pool.run(_synced, 4, train, way)
    _check(answers, only_changes=not in_place)
    for found, layout in answers:
        assert layout.num_bytes <= found[0][1].num_bytes < 1.1 * layout.num_bytes  # gaps between parts


def test_without_delta_no_base_is_stored(pool):
    """No copy of the weights, so no deltas."""
    answers = pool.run(_synced, 2, {}, "shared memory", "full")
    _check(answers, only_changes=False)
    for found, layout in answers:
        assert {ack.extra_bytes for _, ack in found} == {2 * NUM_SLOTS * layout.slot_bytes}


def _ten_syncs(rank: int, world: int, folder: str, way: str) -> list[str]:
    """AdamW steps between syncs, then an export; names of tensors that differ between sampler and a load of the
    export."""
    from meshrl.model.recipe import load_causal_lm

    engine = engine_over(tiny_qwen2(**UNEVEN), world, {"optimizer": {"lr": 1e-3}}, torch.bfloat16)
    synced = _synced_rank(engine, way)

    async def run() -> None:
        await synced.reconcile()
        for version in range(10):
            if version:
                torch.manual_seed(version)
                for p in engine.model.parameters():
                    p.grad = torch.randn_like(p)
                engine.optim_step(1e-3)
            await synced.sync(version)

    asyncio.run(run())
    engine.export(folder)
    synced.close()
    fresh = cast_parameters(load_causal_lm(folder), torch.bfloat16)
    held = synced.sampler._weights.lm
    return [n for n, p in fresh.named_parameters() if not torch.equal(p, held.get_parameter(n))]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shared memory", "sockets"])
@pytest.mark.parametrize("world", [1, 2])
def test_after_ten_syncs_with_training_in_between_a_sampler_equals_a_fresh_load_of_the_export(
    pool, tmp_path, world, way
):
    """Successive deltas add up to exactly the weights."""
    assert pool.run(_ten_syncs, world, str(tmp_path), way) == [[]] * world


def _wrong(rank: int, world: int) -> str:
    """A bit of the other rank's shard changes on the way to rank 0."""
    synced = _synced_rank(engine_over(tiny_qwen2(**UNEVEN), world, {}, torch.bfloat16), "shared memory")
    get = Sockets.get

    async def damaged(self: Sockets, transfer: Transfer) -> Delivery:
        found = await get(self, transfer)
        if rank != 0 or transfer.index != 1:
            return found
        assert found.payload is not None
        payload = found.payload.clone()
        payload[3] ^= 1
        return replace(found, payload=payload)

    async def run() -> str:
        await synced.reconcile()
        try:
            await synced.sync(0)
        except SyncError as error:
            assert synced.sampler.stats().version == -1
            return str(error)
        return "no error"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sockets, "get", damaged)
        answer = asyncio.run(run())
        synced.close()
    return answer


def test_a_bit_that_changes_between_two_ranks_is_an_error_with_its_tensor(pool):
    """The sender computes digests before it sends. The other rank's sync ends, too."""
    first, second = pool.run(_wrong, 2)
    assert "of sender 1" in first and ": model." in first and "was sent with digest" in first
    assert "from its sender" in second or "to a receiver" in second


class Model:
    """A receiver of full tensors that starts with zeros; tied tensors are one."""

    def __init__(self, layout: Layout):
        self.tensors = {t.name: torch.zeros(t.shape, dtype=t.torch_dtype) for t in layout.tensors}
        self.named = self.tensors | {alias: self.tensors[source] for alias, source in layout.tied.items()}
        self.receiver = receiver_of(layout, lambda: self.tensors)

    async def reconcile(self, layout: Layout) -> None:
        """Nothing to compare: the tensors come from the layout."""

    async def begin(self, header: SyncHeader) -> None:
        self.receiver.begin(header)

    async def receive(self, *deliveries: Delivery) -> None:
        for delivery in deliveries:
            self.receiver.receive(delivery)

    async def commit(self) -> Ack:
        return self.receiver.commit(self.named.items)

    async def cancel(self) -> None:
        self.receiver.cancel()


COLUMNS, BLOCKS = [Replicate(), Shard(1)], [Shard(0), Shard(1)]
MIXTURE: dict[str, Any] = dict(vocab_size=61, num_experts=3, moe_intermediate_size=5, tie_word_embeddings=True)


def _placements(name: str, shape: tuple[int, ...]) -> list[Any]:
    """The placements of a tensor on a mesh of 2 x 2; together, all kinds are used."""
    if len(shape) == 1:
        return [Replicate(), Shard(0)]
    if "experts.gate_up_proj" in name:  # several experts, each with some rows of gate and of up
        return BLOCKS
    if "experts.down_proj" in name:
        return [Shard(2), Shard(0)]
    if "embed_tokens" in name or "o_proj" in name:
        return COLUMNS
    return [Shard(1), Shard(1)] if "k_proj" in name else [Shard(1), Shard(0)] if "v_proj" in name else BLOCKS


def _shard(lm: torch.nn.Module) -> dict[str, list[Any]]:
    """Replace each parameter by a DTensor on a mesh of 2 x 2. Returns the placements."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    chosen, sharded = {}, dict[int, torch.nn.Parameter]()  # a tied parameter stays one
    for name, p in list(lm.named_parameters(remove_duplicate=False)):
        if id(p) not in sharded:
            chosen[name] = _placements(name, tuple(p.shape))
            sharded[id(p)] = torch.nn.Parameter(distribute_tensor(p.detach(), mesh, chosen[name]))
        module, _, own = name.rpartition(".")
        lm.get_submodule(module).register_parameter(own, sharded[id(p)])
    assert all(isinstance(p, DTensor) for p in lm.parameters())
    return chosen


def _cut_in_two_dims(rank: int, world: int) -> list[str]:
    """Names of tensors that differ from the original ones after one sync."""
    lm = tiny_lm("qwen3_moe", **MIXTURE)
    names = HubNames(lm)
    full = {name: held[0].elements for name, held in rank_weights(lm, names, torch.bfloat16).sources.items()}
    wanted: Mapping[str, torch.Tensor] = {
        name: elements[0 : elements.numel()].bfloat16().view(names.tensors[name]) for name, elements in full.items()
    }
    assert len({str(each) for each in _shard(lm).values()}) == 6
    held = rank_weights(lm, HubNames(lm), torch.bfloat16)
    boxes: list[Any] = [None] * world
    dist.all_gather_object(boxes, held.boxes())
    layout = make_layout(held.tensors, boxes, held.tied, 2048)
    transport = Sockets(layout, rank, "127.0.0.1", machine=rank // 2)
    addresses: list[Any] = [None] * world
    dist.all_gather_object(addresses, transport.prepare("first"))
    sender, model = WeightSender(layout, rank, keep_base=False), Model(layout)
    sender.begin(held.sources)
    order = SyncOrder(
        header=SyncHeader(version=0, layout_hash=layout.hash),
        connection_id="first",
        senders={other: address for other, address in enumerate(addresses) if other != rank},
        number=rank,
        num_receivers=world - 1,
    )
    ack = asyncio.run(sync_rank(order, layout, transport, sender, model))
    assert ack is not None and (ack.wire, ack.read_back) == (True, True)
    dist.barrier()
    transport.close()
    assert model.tensors.keys() == wanted.keys()
    return [name for name, tensor in wanted.items() if not torch.equal(model.tensors[name], tensor)]


def test_tensors_that_are_cut_by_columns_or_by_two_axes_are_received_in_full(pool):
    """Sharded on dim 1, by two mesh axes, by both axes on one dim, and a joint tensor of experts; over shared
    memory and, between the two halves of the ranks, over TCP."""
    assert pool.run(_cut_in_two_dims, 4) == [[]] * 4
