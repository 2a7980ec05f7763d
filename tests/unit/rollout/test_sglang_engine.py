"""The SGLang engine with a real server, which the tests share."""

import asyncio
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2
import numpy as np
import pytest
from sglang_dropping_loader import DROPPED
from sglang_servers import DROPPING_LOADER, HEADERS, KEY, MAX_CONTEXT_TOKENS, post, sglang_client
from tiny_engines import ask, deliveries, layout_of, sync
from vllm_servers import tiny_vllm_lm

from meshrl.core.errors import CapabilityError, RequestError, StaleWeightsError, SyncError
from meshrl.rollout.server.http import fetch
from meshrl.rollout.sglang import dialect
from meshrl.sync.layout import SyncHeader

CONTEXT = list(range(10, 30))
LONG = 800  # tokens of a turn that still runs when the test continues

pytestmark = pytest.mark.timeout(400)  # the server's start is part of the first test's time


@pytest.fixture(scope="module")
def lm():
    return tiny_vllm_lm()


@pytest.fixture(scope="module")
def other():
    return tiny_vllm_lm(seed=1)


@asynccontextmanager
async def connected(url):
    """An engine for the server."""
    engine = sglang_client(url)
    try:
        yield engine
    finally:
        await engine.close()


async def ready(engine, lm, version=0):
    await engine.reconcile(layout_of(lm))
    return await sync(lm, engine, version)


async def until_tokens(engine, count):
    while engine.stats().decode_tokens < count:
        await asyncio.sleep(0.001)


def running(engine, name, count=LONG):
    return asyncio.create_task(engine.generate(ask(name, CONTEXT, max_new_tokens=count, ignore_eos=True)))


async def half_a_sync(engine, lm, version):
    layout = layout_of(lm)
    await engine.begin(SyncHeader(version=version, layout_hash=layout.hash))
    for delivery in list(deliveries(lm, layout))[:-3]:
        await engine.receive(delivery)


async def test_what_would_end_the_server_is_refused_and_the_server_lives(sglang_server, lm):
    """SGLang ends after a request with an id outside of the vocabulary, after one with min_p in deterministic
    inference, and when memory is allocated that was not released."""
    async with connected(sglang_server) as engine:
        await ready(engine, lm)
        with pytest.raises(RequestError, match="ids from 0 to 63"):
            await engine.generate(ask("a", [*CONTEXT, 64]))
        with pytest.raises(CapabilityError, match="deterministic=false"):
            await engine.generate(ask("a", CONTEXT, min_p=0.1))
        assert await engine.restore({"weights", "kv_cache"}) == 0
        assert len((await engine.generate(ask("a", CONTEXT, ignore_eos=True))).output_ids) == 16


def test_the_key_is_needed_and_no_command_line_shows_it(sglang_server):
    """All users of a machine can read the command lines of its processes."""
    assert httpx2.get(sglang_server + "/server_info", trust_env=False, timeout=60).status_code == 401
    assert fetch("/server_info", sglang_server, HEADERS)
    port, commands = sglang_server.rpartition(":")[2], []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(path.read_text().split("\0"))
    shown = [command for command in commands if port in command]
    assert shown and not [command for command in shown if KEY in command]


async def test_every_position_and_every_id_of_the_model_can_be_used(sglang_server, lm):
    """SGLang keeps prompts out of the last positions of its context."""
    ids = [3 + i % 61 for i in range(MAX_CONTEXT_TOKENS - 1)]
    assert lm.config.max_position_embeddings == MAX_CONTEXT_TOKENS and max(ids) == lm.config.vocab_size - 1
    async with connected(sglang_server) as engine:
        await ready(engine, lm)
        turn = await engine.generate(ask("a", ids, temperature=0.0, ignore_eos=True))
        assert (len(turn.output_ids), turn.stop_reason) == (1, "context")
        turn = await engine.generate(ask("b", ids[:-200], max_new_tokens=300, ignore_eos=True))
        assert (len(turn.output_ids), turn.stop_reason) == (201, "context")


async def test_a_tensor_that_the_server_drops_is_named(sglang_server, lm, other, monkeypatch):
    """SGLang's loaders silently ignore names; the read-back detects it."""
    async with connected(sglang_server) as engine:
        await ready(engine, lm)
        monkeypatch.setattr(dialect, "LOADER", DROPPING_LOADER)
        with pytest.raises(SyncError, match=f"{DROPPED} still has the values of version 0"):
            await sync(other, engine, 1)
        monkeypatch.undo()
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))
        assert (await sync(other, engine, 2)).read_back is True
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {2}


async def test_tokens_of_mixed_weights_are_left_out(sglang_server, lm, other):
    """A request that runs when a sync is cancelled returns only the tokens of the last complete version."""
    async with connected(sglang_server) as engine:
        await ready(engine, lm)
        task = running(engine, "a")
        await until_tokens(engine, 20)
        await half_a_sync(engine, other, 1)
        await engine.cancel()
        turn = await task
        assert turn.stop_reason == "abort" and 20 <= len(turn.output_ids) < LONG
        assert set(turn.versions) == {0} and len(turn.logprobs) == len(turn.output_ids)
        await sync(lm, engine, 2)
        again = await running(engine, "again")
        np.testing.assert_array_equal(turn.output_ids, again.output_ids[: len(turn.output_ids)])


async def test_an_abort_ends_no_other_request(sglang_server, lm):
    """SGLang aborts every request whose id begins with the one given."""
    async with connected(sglang_server) as engine:
        await ready(engine, lm)
        # Four run at a time: when the first has sent 80 tokens, the tenth has started.
        tasks = [running(engine, f"r-{i}", count) for i, count in enumerate([LONG, *[40] * 10], 1)]
        await until_tokens(engine, 4 * 80 + 10)
        assert await engine.abort(["r-1"]) == 1
        assert [(await task).stop_reason for task in tasks] == ["abort", *["length"] * 10]


async def test_memory_is_released_and_restored_by_parts(sglang_server, lm):
    async with connected(sglang_server) as engine:
        await ready(engine, lm)
        num_bytes = await engine.release({"kv_cache"})  # the server's own measurement
        late = asyncio.create_task(engine.generate(ask("late", CONTEXT)))
        await asyncio.sleep(0.05)
        assert num_bytes > 0 and not late.done() and engine.stats().waiting == 1
        assert await engine.restore({"kv_cache"}) == num_bytes
        assert (await late).stop_reason in ("stop", "length")
        assert await engine.release({"weights", "kv_cache"}) >= num_bytes
        assert await engine.release({"weights"}) == 0  # already
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("b", CONTEXT))
        await engine.restore({"weights"})
        ack = await sync(lm, engine, 1)  # a trainer on the same device uses this order: weights, sync, cache
        assert ack.read_back is True
        await engine.restore({"kv_cache"})
        assert set((await engine.generate(ask("c", CONTEXT))).versions) == {1}


async def test_state_that_a_dead_client_has_left_is_cleared(sglang_server, lm):
    post(sglang_server, "/pause_generation", {"mode": "retract"})
    assert post(sglang_server, "/begin_weight_update", {}).status_code == 200
    async with connected(sglang_server) as engine:
        await ready(engine, lm)
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {0}


@pytest.mark.parametrize("end", ["reconcile", "commit", "cancel"])
async def test_no_update_stays_open(sglang_server, lm, end):
    """A server whose update was not ended may compute with weights that it has not repacked."""
    async with connected(sglang_server) as engine:
        await engine.reconcile(layout_of(lm))
        if end == "commit":
            await sync(lm, engine, 0)
        if end == "cancel":
            await half_a_sync(engine, lm, 0)
            await engine.cancel()
        answer = await asyncio.to_thread(post, sglang_server, "/end_weight_update", {})
        assert answer.status_code == 400 and "no weight-update session is open" in answer.text


async def test_weights_of_the_model_folder_can_be_trusted_until_a_sync(sglang_server, lm, other):
    async with connected(sglang_server) as engine:  # an earlier test may have left mixed weights
        await ready(engine, other)
    async with connected(sglang_server) as engine:
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))
        engine.trust_loaded_weights(5)
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {5}
        await ready(engine, other, 6)
        with pytest.raises(StaleWeightsError):
            engine.trust_loaded_weights()
