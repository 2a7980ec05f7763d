"""Weights of the embedded engine: syncs, caches of one version, continuation, released memory."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from tiny_engines import ask, deliveries, layout_of, run, scores, sync, tiny_engine
from tiny_models import tiny_lm
from tiny_specs import worker_spec
from torch.multiprocessing.reductions import StorageWeakRef

from meshrl.cluster.rank_sync import SharedDevice
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.errors import (
    CapabilityError,
    MeshrlError,
    RequestError,
    StaleWeightsError,
    SyncError,
)
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.sync.layout import SyncHeader

CONTEXT = list(range(3, 33))


@pytest.fixture(scope="module")
def old():
    return tiny_lm("qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def new():
    return tiny_lm("qwen2", tie_word_embeddings=True, seed=1)


def logprobs_on(lm, turn, at):
    """The model's logprobs of a turn's tokens at the positions `at`."""
    return scores(lm, [*turn.context_ids, *turn.output_ids])[len(turn.context_ids) :][at]


async def test_after_a_sync_the_engine_equals_a_new_engine_with_the_new_weights(old, new):
    """With the same prompt before and after; the read-back covers both names of the tied head."""
    engine = tiny_engine(old)
    await engine.reconcile(layout_of(new))
    group = [ask(str(g), CONTEXT, seed=g) for g in range(4)]
    before = await asyncio.gather(*map(engine.generate, group))
    ack = await sync(new, engine, 3)
    assert (ack.version, ack.wire, ack.read_back) == (3, True, True) and engine.stats().version == 3
    after = await asyncio.gather(*map(engine.generate, group))
    cold = run(tiny_engine(new), group)
    for g, turn in enumerate(after):
        assert turn.output_ids.tolist() == cold[str(g)].output_ids.tolist() != before[g].output_ids.tolist()
        assert set(turn.versions) == {3} and set(before[g].versions) == {0}
        np.testing.assert_allclose(turn.logprobs, cold[str(g)].logprobs, atol=1e-6)


async def test_no_copy_of_the_old_weights_survives_a_sync_in_bf16(tmp_path, old, new):
    """The fp32 copy of the head and the fused tensors have the new weights."""
    engines = {}
    for name, lm in (("old", old), ("new", new)):
        lm.save_pretrained(tmp_path / name)
        cfg = ModelConfig(path=str(tmp_path / name), dtype="bfloat16")
        engines[name] = build_embedded_engine(cfg, RolloutConfig(), torch.device("cpu"), name, ())
        engines[name].trust_loaded_weights()
    engine, rounded = engines["old"], engines["new"]._weights.lm
    await engine.reconcile(layout_of(rounded))
    await engine.generate(ask("before", CONTEXT))
    await sync(rounded, engine, 1)
    after, cold = await engine.generate(ask("0", CONTEXT)), run(engines["new"], [ask("0", CONTEXT)])["0"]
    assert after.output_ids.tolist() == cold.output_ids.tolist()
    np.testing.assert_array_equal(after.logprobs, cold.logprobs)


async def test_weights_may_change_under_running_requests(old, new):
    """Tokens after the commit have the new version and exactly its logprobs, which old keys and values could not give
    ; waiting requests don't get a stale shared prompt either."""
    engine = tiny_engine(old, max_running=3)
    await engine.reconcile(layout_of(new))
    requests = [ask(str(g), CONTEXT, seed=g, max_new_tokens=40) for g in range(5)]
    waiting = [asyncio.create_task(engine.generate(r)) for r in requests]
    while engine.stats().decode_tokens < 30:
        await asyncio.sleep(0)
    await sync(new, engine, 1)
    turns = await asyncio.gather(*waiting)
    assert {t.stop_reason for t in turns} == {"length"} and {len(t.output_ids) for t in turns} == {40}
    assert sum(len(set(t.versions)) == 2 for t in turns) == 3
    for turn in turns:
        assert (np.diff(turn.versions) >= 0).all()
        for version, lm in enumerate((old, new)):
            at = turn.versions == version
            np.testing.assert_allclose(turn.logprobs[at], logprobs_on(lm, turn, at), atol=1e-5)


@pytest.mark.parametrize("want", [(), ("entropy", "topk:2")])
async def test_an_aborted_turn_continues_where_it_stopped(old, want):
    """Both parts together have the tokens of an uninterrupted turn."""
    engine = tiny_engine(old)
    requests = [ask(str(g), CONTEXT, seed=g, max_new_tokens=50, want=want) for g in range(4)]
    uninterrupted = run(tiny_engine(old), requests)
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
    while engine.stats().decode_tokens < 40:
        await asyncio.sleep(0)
    assert await engine.abort(["1", "unknown"]) == 1 and tasks[1].done() is False
    assert await engine.abort() == 3 and await engine.abort() == 0
    parts = await asyncio.gather(*tasks)
    for r, part in zip(requests, parts):
        assert part.stop_reason == "abort" and 0 < len(part.output_ids) < 50
        r.prefix_output = part.output_ids
    rest = await asyncio.gather(*map(engine.generate, requests))
    for r, part, end in zip(requests, parts, rest):
        assert [*part.output_ids, *end.output_ids] == uninterrupted[r.id].output_ids.tolist()
        logprobs = np.concatenate([part.logprobs, end.logprobs])
        np.testing.assert_allclose(logprobs, uninterrupted[r.id].logprobs, atol=1e-5)
        assert {name: len(x) for name, x in end.extras.items()} == {
            name: 50 - len(part.output_ids) for name in uninterrupted[r.id].extras
        }
    assert engine.stats().running == engine.stats().waiting == 0


async def test_waiting_requests_are_aborted_without_tokens(old):
    engine = tiny_engine(old, max_running=1)
    first = asyncio.create_task(engine.generate(ask("first", CONTEXT)))
    second = asyncio.create_task(engine.generate(ask("second", CONTEXT)))
    while engine.stats().decode_tokens < 2:
        await asyncio.sleep(0)
    await engine.abort(["second"])
    turn = await second
    assert turn.stop_reason == "abort" and turn.output_ids.shape == turn.logprobs.shape == (0,)
    assert (await first).stop_reason == "length"
    assert turn.times.queue_s > 0 == turn.times.decode_s


async def test_a_cancelled_generate_call_removes_its_request(old):
    engine = tiny_engine(old)
    tasks = [asyncio.create_task(engine.generate(ask(str(g), CONTEXT, max_new_tokens=200))) for g in range(2)]
    while engine.stats().decode_tokens < 4:
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.stats().running == 1
    assert (await engine.generate(ask("0", [3]))).stop_reason == "length"  # its id is free again
    await tasks[1]


async def test_requests_of_one_tick_are_admitted_together(old):
    """The same tasks give the same batches, so a repeated run gives the same numbers."""
    engine = tiny_engine(old, max_running=64)
    tasks = [asyncio.create_task(engine.generate(ask(str(g), CONTEXT, seed=g))) for g in range(40)]
    while not engine.stats().decode_tokens:
        await asyncio.sleep(0)
    assert engine.stats().decode_tokens == engine.stats().running == 40
    await asyncio.gather(*tasks)


async def test_a_request_before_the_first_step_joins_it(old):
    engine = tiny_engine(old)
    tasks = [asyncio.create_task(engine.generate(ask("first", CONTEXT)))]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(engine.generate(ask("second", CONTEXT))))
    while not engine.stats().decode_tokens:
        await asyncio.sleep(0)
    assert engine.stats().decode_tokens == 2
    await asyncio.gather(*tasks)


async def test_no_generation_without_a_version(old):
    """An engine without a weight version refuses requests, and so does one with an older version."""
    engine = tiny_engine(old, trusted=False)
    with pytest.raises(StaleWeightsError, match="version -1"):
        await engine.generate(ask("a", CONTEXT, min_version=-1))
    with pytest.raises(SyncError, match="reconcile"):
        await sync(old, engine, 0)
    await engine.reconcile(layout_of(old))
    await sync(old, engine, 4)
    await engine.generate(ask("a", CONTEXT, min_version=4))
    with pytest.raises(StaleWeightsError, match="version 4, request b needs 5"):
        await engine.generate(ask("b", CONTEXT, min_version=5))


async def test_a_request_during_a_sync_waits_for_its_version(old, new):
    engine = tiny_engine(old)
    layout = layout_of(new)
    await engine.reconcile(layout)
    await engine.begin(SyncHeader(version=1, layout_hash=layout.hash))
    with pytest.raises(StaleWeightsError):
        await engine.generate(ask("two", CONTEXT, min_version=2))
    task = asyncio.create_task(engine.generate(ask("one", CONTEXT, min_version=1)))
    for delivery in deliveries(new, layout):
        await engine.receive(delivery)
        await asyncio.sleep(0)
    assert engine.stats().waiting == 1 and engine.stats().version == -1
    await engine.commit()
    turn = await task
    assert set(turn.versions) == {1}
    np.testing.assert_allclose(turn.logprobs, logprobs_on(new, turn, slice(None)), atol=1e-5)


async def test_a_cancelled_sync_aborts_requests_and_new_ones_are_refused_until_the_next_sync(old, new):
    """Some transfers have been loaded, so nothing may be sampled."""
    engine = tiny_engine(old)
    layout = layout_of(new)
    await engine.reconcile(layout)
    task = asyncio.create_task(engine.generate(ask("a", CONTEXT)))
    while engine.stats().decode_tokens < 3:
        await asyncio.sleep(0)
    await engine.begin(SyncHeader(version=1, layout_hash=layout.hash))
    await engine.receive(next(deliveries(new, layout)))
    await engine.cancel()
    turn = await task
    assert turn.stop_reason == "abort" and len(turn.output_ids) >= 3
    with pytest.raises(StaleWeightsError):
        await engine.generate(ask("b", CONTEXT))
    with pytest.raises(StaleWeightsError, match="no longer has"):
        engine.trust_loaded_weights()
    await sync(new, engine, 1)
    assert set((await engine.generate(ask("b", CONTEXT))).versions) == {1}


async def test_a_head_that_is_not_tied_any_more_is_found_at_commit(old, new):
    """The wire proof can't detect it; reading back under both names can."""
    engine = tiny_engine(old)
    layout = layout_of(new)
    await engine.reconcile(layout)
    await engine.begin(SyncHeader(version=1, layout_hash=layout.hash))
    lm = engine._weights.lm
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.clone(), requires_grad=False)
    for delivery in deliveries(new, layout):
        await engine.receive(delivery)
    with pytest.raises(SyncError, match=r"lm_head\.weight"):
        await engine.commit()
    with pytest.raises(StaleWeightsError):
        await engine.generate(ask("a", CONTEXT))


async def test_released_memory_is_really_free_and_can_be_restored(old, new):
    """Parameters and cache release their storage; a running request waits, and continues with the next weights."""
    engine = tiny_engine(old)
    await engine.reconcile(layout_of(new))
    task = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=30)))
    while engine.stats().decode_tokens < 5:
        await asyncio.sleep(0)
    held = list(engine._weights.lm.parameters())
    cache = engine._runner.num_bytes
    weights = sum(p.nbytes for p in held)
    assert cache > 0 and await engine.release({"weights", "kv_cache"}) == cache + weights
    assert sum(p.untyped_storage().nbytes() for p in held) == 0 == engine._runner.num_bytes
    assert await engine.release({"weights", "kv_cache"}) == 0
    with pytest.raises(StaleWeightsError, match="no longer has"):
        engine.trust_loaded_weights()
    assert await engine.restore({"weights"}) == weights and await engine.restore({"weights"}) == 0
    await sync(new, engine, 1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done() and engine.stats().running == 0  # the cache's memory is still released
    await engine.restore({"kv_cache"})
    turn = await task
    assert len(turn.output_ids) == 30 and set(turn.versions) == {0, 1}
    at = turn.versions == 1
    np.testing.assert_allclose(turn.logprobs[at], logprobs_on(new, turn, at), atol=1e-5)
    assert engine._weights.lm.lm_head.weight is engine._weights.lm.model.embed_tokens.weight
    with pytest.raises(CapabilityError, match="gradients"):
        await engine.release({"gradients"})


async def test_releasing_only_the_cache_keeps_the_weights(old):
    engine = tiny_engine(old)
    request = ask("a", CONTEXT, max_new_tokens=30)
    task = asyncio.create_task(engine.generate(request))
    while engine.stats().decode_tokens < 5:
        await asyncio.sleep(0)
    assert await engine.release({"kv_cache"}) > 0
    assert await engine.restore({"kv_cache"}) == 0
    assert (await task).output_ids.tolist() == run(tiny_engine(old), [request])["a"].output_ids.tolist()


def test_a_rank_that_trains_frees_the_caches_of_its_sampler_unless_that_has_work(old):
    engine = tiny_engine(old)
    memory = SharedDevice(worker_spec(rank=0, num_train_ranks=1), torch.device("cpu"), {}, engine)
    request = ask("a", CONTEXT, max_new_tokens=12)
    engine.submit(request)
    turns = dict(engine.step())
    memory.for_training()
    assert engine._runner.num_bytes > 0 and engine.has_work
    while engine.has_work:
        turns |= engine.step()
    assert engine._runner.num_bytes > 0
    memory.for_training()
    assert engine._runner.num_bytes == 0
    again = run(engine, [ask("b", CONTEXT, max_new_tokens=12)])["b"]
    assert again.output_ids.tolist() == turns["a"].output_ids.tolist()


async def test_a_step_that_fails_reaches_every_caller(old):
    broken = tiny_lm("qwen2")
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    engine = tiny_engine(broken, max_running=1)
    results = await asyncio.gather(*(engine.generate(ask(str(g), CONTEXT)) for g in range(3)), return_exceptions=True)
    assert all(isinstance(r, MeshrlError) for r in results) and not engine.has_work


async def test_times_and_close(old):
    engine = tiny_engine(old, max_running=1)
    turns = await asyncio.gather(*(engine.generate(ask(str(g), CONTEXT, seed=g)) for g in range(2)))
    for turn in turns:
        assert min(turn.times.queue_s, turn.times.prefill_s, turn.times.decode_s) > 0
    assert turns[1].times.queue_s > turns[0].times.prefill_s + turns[0].times.decode_s
    assert turns[1].times.cached_tokens == len(CONTEXT) - 1
    task = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=200)))
    while engine.stats().decode_tokens < 40:
        await asyncio.sleep(0)
    await engine.close()
    assert (await task).stop_reason == "abort" and engine._runner.num_bytes == 0
    with pytest.raises(RequestError, match="closed"):
        await engine.generate(ask("b", CONTEXT))


async def test_released_weights_are_freed_and_restored_into_the_fused_tensors(old, new):
    """Also parameters that share their memory with numpy, as for digests: it can't be released in place, and the fused
    tensors refer to it."""
    engine = tiny_engine(old)
    await engine.reconcile(layout_of(new))
    await engine.generate(ask("a", CONTEXT))
    params = list(engine._weights.lm.parameters())
    for p in params:
        p.detach().numpy()
    memory = [StorageWeakRef(p.untyped_storage()) for p in params]
    num_bytes = sum(p.nbytes for p in params)
    assert await engine.release({"weights", "kv_cache"}) >= num_bytes
    assert all(storage.expired() for storage in memory)
    assert await engine.restore({"weights"}) == num_bytes
    await sync(new, engine, 1)
    await engine.restore({"kv_cache"})
    turn, cold = await engine.generate(ask("b", CONTEXT)), run(tiny_engine(new), [ask("b", CONTEXT)])["b"]
    assert turn.output_ids.tolist() == cold.output_ids.tolist()
    np.testing.assert_array_equal(turn.logprobs, cold.logprobs)


@pytest.mark.parametrize("own", ["weight", "bias"])
async def test_a_parameter_outside_its_fused_tensor_is_found_at_commit(old, new, own):
    """The forward uses one fused tensor for several layers; a sync into a separate parameter has no effect."""
    name, lm = "model.layers.1.self_attn.k_proj", copy.deepcopy(new)
    torch.nn.init.normal_(lm.get_submodule(name).bias)
    engine = tiny_engine(old)
    await engine.reconcile(layout_of(lm))
    p = getattr(engine._weights.lm.get_submodule(name), own)
    p.data = p.data.clone()
    with pytest.raises(SyncError, match=f"{name}.{own} is not a view of the fused tensor"):
        await sync(lm, engine, 1)


async def answered(call, sent):
    """A call of a rank: its result is sent in the tick of the event loop after it has ended."""
    await call
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.call_soon(lambda: (sent(), done.set()))
    await done.wait()


async def test_answers_are_sent_before_the_next_step(old, new, monkeypatch):
    """A step may take long, above all the first one after a sync, which computes the contexts of all running requests
    again. Answers that exist do not wait for it, and no step comes between a commit and its acknowledgement."""
    engine, steps = tiny_engine(old), []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: steps.append(step()) or steps[-1])
    seen = {}
    await engine.reconcile(layout_of(new))
    long = asyncio.ensure_future(engine.generate(ask("long", CONTEXT, max_new_tokens=200)))
    short = engine.generate(ask("short", CONTEXT[:5], max_new_tokens=3))
    await answered(short, lambda: seen.update(short=len(steps)))
    commit = engine.commit

    async def committed():
        seen["before"] = len(steps)
        return await commit()

    monkeypatch.setattr(engine, "commit", committed)
    await answered(asyncio.ensure_future(sync(new, engine, 1)), lambda: seen.update(sync=len(steps)))
    await engine.abort()
    await long
    assert [len(turns) for turns in steps[: seen["short"]]] == [0, 0, 1]
    assert seen["sync"] == seen["before"]
