"""The contract of a weight sync for every engine: each injected fault is caught within the sync and named, nothing is
sampled with the mixed weights, and the next sync repairs them."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from test_rollout_engines import ENGINES, go
from tiny_engines import ask, check_samples_from, deliveries, layout_of, sync
from tiny_sync import Trainer, header_of
from vllm_servers import tiny_vllm_lm

from meshrl.core.errors import StaleWeightsError, SyncError
from meshrl.model.hub_names import HubNames
from meshrl.sync.delivery import ALL
from meshrl.sync.digest import digest_bytes
from meshrl.sync.layout import Box, make_layout
from meshrl.train.weights import rank_weights

pytestmark = pytest.mark.timeout(300)  # the first test waits for a server to start

LONG = [3 + i % 61 for i in range(200)]  # more than one block of a paged cache


@pytest.fixture(scope="module")
def models():
    return [tiny_vllm_lm(seed=seed) for seed in range(2)]


@pytest.fixture(params=ENGINES)
def make(request, models):
    """Await it for an engine with the first model's weights as version 0."""
    if request.param != "embedded":
        request.getfixturevalue(f"{request.param}_server")

    async def build():
        engine = ENGINES[request.param](models[0], request)
        await engine.reconcile(layout_of(models[0]))
        await sync(models[0], engine, 0)
        return engine

    return build


def test_new_weights_are_the_trainers_also_after_a_swap_back(make, models):
    """A tied head with a stale packed copy is about 3 nats off, which the swap back alone would hide. The
    prompt is longer than a block of the cache, and was sent before."""

    async def main():
        engine = await make()
        for version, lm in enumerate([models[0], models[1], models[0]]):
            if version:
                ack = await sync(lm, engine, version)
                assert ack.wire and ack.read_back == (None if engine.engine_id == "endpoint-0" else True)
                assert ack.num_tensors == len(dict(lm.named_parameters()))
            turn = await check_samples_from(engine, lm, LONG, f"a{version}")
            assert set(turn.versions) == {version}
            await check_samples_from(engine, lm, LONG, f"b{version}")  # from the prefix cache, if there is one
        await engine.close()

    go(main)


async def send(engine, layout, sent, version=1):
    """A sync of these deliveries; after an error the engine is cancelled."""
    try:
        await engine.begin(header_of(layout, version))
        for delivery in sent:
            await engine.receive(delivery)
        return await engine.commit()
    except SyncError:
        await engine.cancel()
        raise


def with_a_bit_flipped(delivery):
    delivery.payload[100] ^= 1
    return delivery


FAULTS = {  # -> change of the deliveries, expected error
    "dropped": (lambda sent: sent[:-1], "incomplete"),
    "out of order": (lambda sent: [sent[1], sent[0], *sent[2:]], "transfer 1 .* was received; expected transfer 0"),
    "twice": (lambda sent: [sent[0], *sent], "transfer 0 .* was received; expected transfer 1"),
    "cut short": (lambda sent: [*sent[:2], replace(sent[2], payload=sent[2].payload[:-16]), *sent[3:]], "expected"),
    "a bit flipped": (lambda sent: [*sent[:2], with_a_bit_flipped(sent[2]), *sent[3:]], "model.*was sent with digest"),
    "digests of another": (
        lambda sent: [*sent[:2], replace(sent[2], digests=sent[3].digests[:1] * len(sent[2].digests)), *sent[3:]],
        "model.*was sent with digest",
    ),
    "a delta in a full sync": (
        lambda sent: [replace(each, counts=(0,) * len(each.digests)) for each in sent],
        "carries changes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_transit_is_caught_and_the_next_sync_repairs_it(make, models, fault):
    mangle, complaint = FAULTS[fault]

    async def main():
        engine = await make()
        layout = layout_of(models[1])
        with pytest.raises(SyncError, match=complaint):
            await send(engine, layout, mangle(list(deliveries(models[1], layout))))
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", LONG))
        await sync(models[1], engine, 1)
        await check_samples_from(engine, models[1], LONG, "b")

    go(main)


def test_a_version_that_does_not_rise_or_another_layout_is_refused(make, models):
    async def main():
        engine = await make()
        with pytest.raises(SyncError, match="rise"):
            await sync(models[1], engine, 0)
        await sync(models[1], engine, 0)  # a retry; after the refusal the weights are unusable
        with pytest.raises(SyncError, match="layout"):
            await send(engine, layout_of(models[1], transfer_bytes=8192), [])

    go(main)


def test_requests_that_come_during_a_sync_wait_for_its_version(make, models):
    async def main():
        engine, layout = await make(), layout_of(models[1])
        await engine.begin(header_of(layout, 1))
        task = asyncio.create_task(engine.generate(ask("a", LONG, ignore_eos=True, min_version=1)))
        for delivery in deliveries(models[1], layout):
            await engine.receive(delivery)
        await asyncio.sleep(0.05)
        assert not task.done() and engine.stats().waiting + engine.stats().running == 1
        await engine.commit()
        assert set((await task).versions) == {1}

    go(main)


def test_a_cancelled_sync_aborts_the_requests_that_wait_for_it(make, models):
    async def main():
        engine = await make()
        await engine.begin(header_of(layout_of(models[1]), 1))
        task = asyncio.create_task(engine.generate(ask("a", LONG)))
        await asyncio.sleep(0.05)
        await engine.cancel()
        turn = await task
        assert turn.stop_reason == "abort" and len(turn.output_ids) == 0
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("b", LONG))

    go(main)


class TwoRanks(Trainer):
    """A trainer on two ranks: each has half of the rows of every tensor, and the last sent values as base."""

    def __init__(self, lm):
        full = rank_weights(lm, HubNames(lm), torch.float32)
        ranks = [[], []]
        for name, (shape, _) in full.tensors.items():
            half = -(-shape[0] // 2)
            zeros = (0,) * (len(shape) - 1)
            ranks[0].append(Box(name, (0, *zeros), (half, *shape[1:])))
            ranks[1].append(Box(name, (half, *zeros), (shape[0] - half, *shape[1:])))
        super().__init__(make_layout(full.tensors, ranks, full.tied, 8192))

    async def sync(self, lm, engine, version, base=None, mangle=lambda delivery: delivery):
        weights = {name: p.detach() for name, p in lm.named_parameters()}
        await engine.begin(header_of(self.layout, version, base))
        for delivery in self.deliveries(weights, version, base is not None):
            await engine.receive(mangle(delivery))
        return await engine.commit()


def trained(lm, seed):
    """The model after a step that has changed about 2 % of its elements."""
    lm, generator = copy.deepcopy(lm), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.parameters():
            p += (torch.rand(p.shape, generator=generator) < 0.02) * torch.randn(p.shape, generator=generator)
    return lm


def test_boxes_of_two_ranks_are_loaded_and_then_deltas(make, models):
    """Exact to the bit, by the engine's proofs, also after a sync that changes few elements."""

    async def main():
        engine, trainer, lm = await make(), TwoRanks(models[0]), models[1]
        await engine.reconcile(trainer.layout)
        full = await trainer.sync(lm, engine, 0)
        await check_samples_from(engine, lm, LONG, "0")
        for version in (1, 2):
            lm = trained(lm, version)
            ack = await trainer.sync(lm, engine, version, base=version - 1)
            assert ack.wire and ack.read_back == full.read_back and ack.num_bytes < full.num_bytes / 5
            turn = await check_samples_from(engine, lm, LONG, str(version))
            assert set(turn.versions) == {version} == {engine.stats().version}
        await engine.close()

    go(main)


def wrong_payload(delivery):
    delivery.payload[0] ^= 1
    return delivery


def wrong_change(delivery):
    """Damage before the payload's digest was computed: only the digest of the part detects it."""
    wrong_payload(delivery)
    return replace(delivery, payload_digest=digest_bytes("xxh3", delivery.payload))


def full_in_a_delta(delivery):
    return replace(delivery, counts=(ALL,) * len(delivery.counts))


@pytest.mark.parametrize("fault", [wrong_payload, wrong_change, full_in_a_delta])
def test_a_fault_in_the_changes_is_caught_and_a_full_sync_repairs_it(make, models, fault):
    async def main():
        engine, trainer, lm = await make(), TwoRanks(models[0]), models[1]
        await engine.reconcile(trainer.layout)
        await trainer.sync(lm, engine, 0)
        lm = trained(lm, 1)

        def mangle(delivery):
            return fault(delivery) if delivery.transfer.number == 2 else delivery

        with pytest.raises(SyncError, match=r"model\.|expected"):
            await trainer.sync(lm, engine, 1, base=0, mangle=mangle)
        await engine.cancel()
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", LONG))
        for sender in trainer.senders:
            sender.base_version = 0
        with pytest.raises(SyncError, match="base version"):
            await trainer.sync(lm, engine, 1, base=0)
        await trainer.sync(lm, engine, 1)
        await check_samples_from(engine, lm, LONG, "b")
        await engine.close()

    go(main)
