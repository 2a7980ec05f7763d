"""The contract of every rollout engine, tested through rollout.base.RolloutEngine. A new engine is a row of ENGINES."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from sglang_servers import endpoint_client, sglang_client
from tiny_engines import ask, layout_of, scores, sync, tiny_engine
from tiny_tokenizers import numbered_tokenizer
from vllm_servers import client_of, tiny_vllm_lm

from meshrl.core.errors import CapabilityError, RequestError, StaleWeightsError, SyncError, UnloadedParamsError
from meshrl.rollout.base import RolloutEngine
from meshrl.rollout.stop_strings import StopStrings
from meshrl.sync.layout import make_layout
from meshrl.sync.receiver import describe

ROOM = 1024  # tokens of context and answer
LONG = 800  # tokens of a turn that is to be interrupted: it must still run when the test interrupts it
FACTS: dict[str, Any] = {"max_context_tokens": ROOM, "stop_strings": StopStrings(lambda: numbered_tokenizer(64))}


def embedded(lm: torch.nn.Module, fixtures: pytest.FixtureRequest) -> RolloutEngine:
    return tiny_engine(lm, trusted=False, stop_token_ids=(2,), max_running=4, **FACTS)


def vllm(lm: torch.nn.Module, fixtures: pytest.FixtureRequest) -> RolloutEngine:
    return client_of(fixtures.getfixturevalue("vllm_server"), keep_weights=True, **FACTS)


def sglang(lm: torch.nn.Module, fixtures: pytest.FixtureRequest) -> RolloutEngine:
    return sglang_client(fixtures.getfixturevalue("sglang_server"), keep_weights=True, **FACTS)


def sglang_tp2(lm: torch.nn.Module, fixtures: pytest.FixtureRequest) -> RolloutEngine:
    return sglang_client(fixtures.getfixturevalue("sglang_tp2_server"), keep_weights=True, **FACTS)


def endpoint(lm: torch.nn.Module, fixtures: pytest.FixtureRequest) -> RolloutEngine:
    return endpoint_client(*fixtures.getfixturevalue("endpoint_server"), keep_weights=True, **FACTS)


ENGINES = {  # name -> an engine with FACTS, stop id 2 and no weights, which also accepts deltas
    "embedded": embedded,
    "vllm": vllm,
    "sglang": sglang,
    "sglang_tp2": sglang_tp2,
    "endpoint": endpoint,
}
pytestmark = pytest.mark.timeout(300)  # the first test waits for a server to start

CONTEXT = list(range(10, 40))


@pytest.fixture(scope="module")
def lm():
    return tiny_vllm_lm()


@pytest.fixture(params=ENGINES)
def name(request):
    return request.param


@pytest.fixture
def make(name, request, lm):
    """Await it for an engine that has reconciled and has the model's weights as version 0."""
    if name != "embedded":  # its server is started outside of the test's deadline, or the test is skipped
        request.getfixturevalue(f"{name}_server")

    async def build():
        engine = ENGINES[name](lm, request)
        await engine.reconcile(layout_of(lm))
        await sync(lm, engine, 0)
        return engine

    return build


def go(main):
    """Run a test's coroutine within a deadline, so that a hang fails."""
    asyncio.run(asyncio.wait_for(main(), 100))


async def until_tokens(engine, count):
    while engine.stats().decode_tokens < count:
        await asyncio.sleep(0.001)


def test_a_turn_is_complete(make):
    async def main():
        engine = await make()
        requests = [ask(str(g), CONTEXT, seed=g, max_new_tokens=12) for g in range(6)]
        for request, turn in zip(requests, await asyncio.gather(*map(engine.generate, requests))):
            count = len(turn.output_ids)
            assert turn.context_ids.tolist() == CONTEXT  # the server has used the ids that it was sent
            assert 1 <= count <= 12 and turn.logprobs.shape == turn.versions.shape == (count,)
            assert turn.output_ids.dtype == turn.versions.dtype == np.int32 and turn.logprobs.dtype == np.float32
            assert (turn.logprobs <= 0).all() and set(turn.versions) == {0}
            assert turn.stop_reason == ("stop" if turn.output_ids[-1] == 2 else "length")
            assert 2 not in turn.output_ids[:-1]
            assert (turn.seed, turn.sampling) == (request.seed, request.sampling) and turn.engine_id
            assert turn.times.prefill_s > 0
        await engine.close()

    go(main)


def test_equal_requests_get_equal_answers_and_another_seed_another_answer(make):

    async def main():
        engine = await make()
        first = await engine.generate(ask("a", CONTEXT, seed=5, ignore_eos=True))
        others = [ask(f"c{g}", CONTEXT[g:], seed=g, ignore_eos=True) for g in range(5)]
        again, other, *_ = await asyncio.gather(
            engine.generate(ask("b", CONTEXT, seed=5, ignore_eos=True)),
            engine.generate(ask("d", CONTEXT, seed=6, ignore_eos=True)),
            *map(engine.generate, others),
        )
        assert first.output_ids.tolist() == again.output_ids.tolist() != other.output_ids.tolist()

    go(main)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_agree_with_a_forward_without_a_cache(make, lm, temperature):
    """Those at temperatures 0 and 1 have the same distribution."""

    async def main():
        engine = await make()
        turn = await engine.generate(ask("a", CONTEXT, temperature=temperature, seed=1, ignore_eos=True))
        expected = scores(lm, [*turn.context_ids, *turn.output_ids])[len(CONTEXT) :]
        close = np.allclose(turn.logprobs, expected, atol=1e-4)
        assert close == (temperature != 0.7)

    go(main)


def test_filters_and_penalties_change_what_is_sampled(make):
    """Evaluations may use them. A server that does not get them answers as if they were off."""

    async def main():
        engine = await make()
        greedy = await engine.generate(ask("greedy", CONTEXT, temperature=0.0, ignore_eos=True))
        for name, value in (("top_k", 1), ("top_p", 1e-6)):
            turn = await engine.generate(ask(name, CONTEXT, seed=1, ignore_eos=True, **{name: value}))
            assert turn.output_ids.tolist() == greedy.output_ids.tolist(), name
        turn = await engine.generate(ask("c", CONTEXT, temperature=0.0, ignore_eos=True, repetition_penalty=2.0))
        assert turn.output_ids.tolist() != greedy.output_ids.tolist()

    go(main)


def test_a_turn_ends_with_a_stop_token_id(make):
    """Also with one that the model's folder does not have, which the server learns from the request alone."""

    async def main():
        engine = await make()
        free = (await engine.generate(ask("free", CONTEXT, seed=1, ignore_eos=True))).output_ids.tolist()
        stop = next(token for token in free[4:] if token != 2)
        turn = await engine.generate(ask("cut", CONTEXT, seed=1, stop_token_ids=(stop,)))
        count = next(i for i, token in enumerate(free, 1) if token in (2, stop))
        assert turn.output_ids.tolist() == free[:count] and turn.stop_reason == "stop"

    go(main)


def test_abort_and_continuation_make_one_turn(make, name, lm):
    async def main():
        engine = await make()
        same = {"seed": 3, "max_new_tokens": LONG, "ignore_eos": True}
        full = await engine.generate(ask("full", CONTEXT, **same))
        for _ in range(30):  # on a busy machine the turn may be finished before its first tokens are received
            before = engine.stats().decode_tokens
            task = asyncio.create_task(engine.generate(ask("part", CONTEXT, **same)))
            await until_tokens(engine, before + 5)
            count = await engine.abort(["part"])
            part = await task
            if part.stop_reason == "abort":
                break
        assert count == 1 and part.stop_reason == "abort" and 0 < len(part.output_ids) < LONG
        assert part.output_ids.tolist() == full.output_ids.tolist()[: len(part.output_ids)]
        rest = await engine.generate(ask("rest", CONTEXT, prefix_output=part.output_ids, **same))
        joined = [*part.output_ids, *rest.output_ids]
        assert len(joined) == LONG and rest.stop_reason == "length" and len(rest.logprobs) == len(rest.output_ids)
        if name == "endpoint":  # a continuation gets another seed: a server may seed a generator for each request
            assert joined != full.output_ids.tolist()
        elif name != "vllm":  # its random numbers start again with the continuation
            assert joined == full.output_ids.tolist()
        expected = scores(lm, [*CONTEXT, *joined])[len(CONTEXT) + len(part.output_ids) :]
        np.testing.assert_allclose(rest.logprobs, expected, atol=0.1)  # those of the full sequence

    go(main)


def text_of(ids: np.ndarray) -> str:
    """The text of these ids by numbered_tokenizer."""
    return "".join(f"<{i}>" for i in ids)


def test_a_turn_ends_with_the_token_that_completes_a_stop_string(make):
    """Ids, logprobs and versions end there in every engine, even if its server has sampled more, and that token is not
    cut."""

    async def main():
        engine = await make()
        same = {"max_new_tokens": 60, "ignore_eos": True}
        free = [await engine.generate(ask(f"free {g}", CONTEXT, seed=g, **same)) for g in range(6)]
        stops, counts = [], []
        for g, turn in enumerate(free):
            before, middle, after = turn.output_ids[3 + 8 * g :][:3].tolist()
            stops.append(f"{before % 10}><{middle}><{str(after)[0]}")  # begins and ends in the middle of a token
            counts.append(next(n for n in range(60) if stops[g] in text_of(turn.output_ids[:n])))
        asked = [ask(f"cut {g}", CONTEXT, seed=g, stop=("no such text", stops[g]), **same) for g in range(6)]
        for turn, full, count in zip(await asyncio.gather(*map(engine.generate, asked)), free, counts, strict=True):
            assert turn.stop_reason == "stop"
            assert turn.output_ids.tolist() == full.output_ids[:count].tolist()
            np.testing.assert_allclose(turn.logprobs, full.logprobs[:count], atol=1e-4)
            assert turn.versions.tolist() == [0] * count
        assert engine.stats().running == 0
        assert max(counts) > 30 and min(counts) < 16
        await engine.close()

    go(main)


def test_a_continued_turn_ends_at_a_stop_string_that_began_before_its_abort(make):
    async def main():
        engine = await make()
        same = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}
        ids = (await engine.generate(ask("full", CONTEXT, **same))).output_ids
        stop = text_of(ids[4:8])
        count = next(n for n in range(30) if stop in text_of(ids[:n]))
        for cut in (count - 1, count - 3):
            rest = await engine.generate(ask("rest", CONTEXT, prefix_output=ids[:cut], stop=(stop,), **same))
            assert rest.output_ids.tolist() == ids[cut:count].tolist() and rest.stop_reason == "stop"
        await engine.close()

    go(main)


def test_a_stop_string_ends_a_turn_that_its_server_would_continue(make):
    """A turn of up to LONG tokens returns early, and its row is free for the next turn."""

    async def main():
        engine = await make()
        turns = [
            await engine.generate(ask(f"{g}", CONTEXT, seed=g, max_new_tokens=LONG, ignore_eos=True, stop=("<",)))
            for g in range(8)  # twice the number of rows that the engine runs together
        ]
        assert all(len(turn.output_ids) == 1 and turn.stop_reason == "stop" for turn in turns)
        assert engine.stats().decode_tokens == 8
        await engine.close()

    go(main)


def test_a_sync_replaces_the_weights_and_the_version(make, name, lm):
    """After a sync, the new weights answer the old prompt; a version that does not exist is refused."""

    async def main():
        engine, other = await make(), tiny_vllm_lm(seed=1)
        before = await engine.generate(ask("a", CONTEXT, seed=1, ignore_eos=True))
        ack = await sync(other, engine, 1)
        assert ack.wire and ack.read_back == (None if name == "endpoint" else True)
        after = await engine.generate(ask("a", CONTEXT, seed=1, ignore_eos=True, min_version=1))
        assert set(after.versions) == {1} and after.output_ids.tolist() != before.output_ids.tolist()
        expected = scores(other, [*after.context_ids, *after.output_ids])[len(CONTEXT) :]
        np.testing.assert_allclose(after.logprobs, expected, atol=0.1)
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("b", CONTEXT, min_version=2))
        with pytest.raises(SyncError):
            await sync(lm, engine, 1)  # versions rise

    go(main)


def test_a_cancelled_sync_leaves_no_usable_weights(make, lm):
    async def main():
        engine = await make()
        await engine.cancel()
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))
        await sync(lm, engine, 1)
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {1}

    go(main)


def test_running_requests_survive_new_weights_where_declared(make, lm):
    async def main():
        engine, models = await make(), [lm, tiny_vllm_lm(seed=1)]
        if not engine.capabilities.in_flight:
            return
        for version in range(1, 11):  # on a busy machine the turn may be finished before the sync begins
            before = engine.stats().decode_tokens
            task = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=LONG, ignore_eos=True)))
            await until_tokens(engine, before + 3)
            await sync(models[version % 2], engine, version)
            turn = await task
            if turn.versions[-1] == version:
                break
        assert len(turn.versions) == LONG and (np.diff(turn.versions) >= 0).all()
        assert set(turn.versions) == {version - 1, version}
        expected = scores(models[version % 2], [*CONTEXT, *turn.output_ids])[len(CONTEXT) :]
        new = turn.versions == version
        np.testing.assert_allclose(turn.logprobs[new], expected[new], atol=1e-4)  # the cache was computed again

    go(main)


def test_released_memory_can_be_restored_where_declared(make, lm):
    async def main():
        engine = await make()
        if not engine.capabilities.release:
            return
        running = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=LONG, ignore_eos=True)))
        while engine.stats().decode_tokens < 2:
            await asyncio.sleep(0)
        assert await engine.release({"weights", "kv_cache"}) > 0
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("b", CONTEXT))
        num_tokens = engine.stats().decode_tokens
        assert await engine.restore({"weights", "kv_cache"}) > 0
        await asyncio.sleep(0.3)  # it must not sample with garbage weights
        assert engine.stats().decode_tokens - num_tokens <= 2  # tokens that were still in transit
        versions = {0} if running.done() else {0, 1}  # an engine may finish it before it releases memory
        await sync(lm, engine, 1)
        await engine.generate(ask("b", CONTEXT))
        assert set((await running).versions) == versions and len((await running).output_ids) == LONG

    go(main)


def test_names_that_do_not_fit_are_refused(make, lm):
    """In both directions, before any training."""

    async def main():
        engine = await make()
        specs = describe(dict(lm.named_parameters()))
        for wrong in (dict(list(specs.items())[:-1]), specs | {"model.extra.weight": ((2,), "float32")}):
            with pytest.raises(UnloadedParamsError):
                await engine.reconcile(make_layout(wrong))

    go(main)


def test_unsupported_requests_are_refused_at_once(make):
    async def main():
        engine = await make()
        with pytest.raises(RequestError, match=str(ROOM)):
            await engine.generate(ask("a", [3] * ROOM))
        with pytest.raises(CapabilityError):
            await engine.generate(ask("b", CONTEXT, adapter="x"))
        with pytest.raises(CapabilityError):
            await engine.release({"gradients"})
        assert engine.stats().running == engine.stats().waiting == 0

    go(main)
