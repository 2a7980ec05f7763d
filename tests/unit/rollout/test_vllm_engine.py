"""The vLLM engine with the real vLLM: its two traps, tensor parallelism, and its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tiny_engines import ask, distance, layout_of, sync
from vllm_servers import MISSING, client_of, config_of, serving, tiny_vllm_lm

from meshrl.core.errors import CapabilityError, EngineEnded, EngineFailure, StaleWeightsError, SyncError
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.vllm.dialect import VllmDialect, http_of

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(400)]

LONG = [3 + i % 61 for i in range(200)]  # vLLM's cache has blocks of 128 tokens on the CPU


@pytest.fixture
def server(vllm_server: ServerProcess) -> ServerProcess:
    return vllm_server


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
        folder = tmp_path_factory.mktemp("faulty") / "model"
        with serving(tiny_vllm_lm(), folder, "--worker-extension-cls", "vllm_stale_head.StaleHead") as server:
            yield server


async def synced(server: ServerProcess, lm: torch.nn.Module, engine: ServerEngine | None = None) -> ServerEngine:
    engine = engine or client_of(server)
    await engine.reconcile(layout_of(lm))
    await sync(lm, engine, 0)
    return engine


class KeepsCache(VllmDialect):
    """Does not drop the prefix cache when new weights are loaded."""

    async def begin_update(self, label: str, has_cache: bool) -> None:
        pass


async def test_a_stale_prefix_cache_is_found_by_the_re_score(server):
    """This is the reason for dropping the cache in every sync."""
    other = tiny_vllm_lm(seed=1)
    correct = await synced(server, tiny_vllm_lm())
    await distance(correct, tiny_vllm_lm(), LONG, "a")
    assert (await correct.generate(ask("b", LONG))).times.cached_tokens >= 128  # so the cache is used
    await sync(other, correct, 1)
    assert await distance(correct, other, LONG, "c") < 1e-4

    stale = client_of(server, KeepsCache, max_context_tokens=512)
    await synced(server, tiny_vllm_lm(), stale)
    http = http_of(server)
    await http.post("/reset_prefix_cache")
    await http.close()
    await distance(stale, tiny_vllm_lm(), LONG, "d")
    await sync(other, stale, 1)
    assert await distance(stale, other, LONG, "e") > 0.05


async def test_prompts_longer_than_a_step_wait_and_are_not_split(server):
    """On a CPU vLLM crashes when it splits the prompt of a request with a seed."""
    engine = await synced(server, tiny_vllm_lm())
    prompts = [[3 + (i * (g + 1) + g) % 61 for i in range(900)] for g in range(4)]
    turns = await asyncio.gather(*(engine.generate(ask(str(g), p, seed=g)) for g, p in enumerate(prompts)))
    assert all(1 <= len(turn.output_ids) <= 16 for turn in turns)


async def test_extras_are_the_likeliest_tokens_in_order(server):
    engine = await synced(server, tiny_vllm_lm())
    turn = await engine.generate(ask("a", LONG, seed=3, ignore_eos=True, want=("topk:3",)))
    ids, logprobs = turn.extras["topk_ids"], turn.extras["topk_logprobs"]
    assert ids.shape == logprobs.shape == (16, 3) and (np.diff(logprobs) <= 0).all()
    assert (turn.logprobs <= logprobs[:, 0] + 1e-6).all()
    for want in ("entropy", "topk:0", "topk:20"):
        with pytest.raises(CapabilityError, match="topk:N"):
            await engine.generate(ask("b", LONG, want=(want,)))
    with pytest.raises(CapabilityError, match="temperature"):
        await engine.generate(ask("c", LONG, temperature=0.001))


async def test_the_weights_of_the_folder_are_a_version_until_a_sync_begins(server):
    engine = await synced(server, tiny_vllm_lm())
    with pytest.raises(StaleWeightsError, match="no longer has the weights of its model folder"):
        engine.trust_loaded_weights()
    fresh = client_of(server)
    with pytest.raises(StaleWeightsError, match="trust_loaded_weights"):
        await fresh.generate(ask("a", LONG))


async def test_released_weights_need_a_sync_and_running_requests_finish_before(server):
    """Weights are restored first, then synced, and the cache is restored last; nothing is sampled before."""
    old, new = tiny_vllm_lm(), tiny_vllm_lm(seed=1)
    engine = await synced(server, old)
    running = asyncio.create_task(engine.generate(ask("a", LONG, seed=1, max_new_tokens=200, ignore_eos=True)))
    while engine.stats().decode_tokens < 5:
        await asyncio.sleep(0.01)
    num_bytes = sum(p.nbytes for p in old.parameters())
    freed = await engine.release({"weights", "kv_cache"})
    assert running.done() and len((await running).output_ids) == 200
    assert freed >= num_bytes + config_of().vllm.kv_cache_bytes
    assert await engine.release({"weights"}) == 0  # already
    with pytest.raises(StaleWeightsError):
        await engine.generate(ask("b", LONG))
    await engine.restore({"weights"})
    await sync(new, engine, 1)
    later = asyncio.create_task(engine.generate(ask("c", LONG, seed=1, ignore_eos=True)))
    await asyncio.sleep(0.2)
    assert not later.done()
    assert 0 < await engine.restore({"kv_cache"}) <= freed - num_bytes
    assert (await later).versions.tolist() == [1] * len((await later).output_ids)
    assert await distance(engine, new, LONG, "d") < 1e-4
    await engine.release({"weights"})
    with pytest.raises(SyncError, match="memory is released; restore it"):
        await sync(old, engine, 2)
    await engine.restore({"weights"})
    await sync(old, engine, 3)
    assert await distance(engine, old, LONG, "e") < 1e-4


async def test_a_released_cache_holds_requests_until_it_is_restored(server):
    engine = await synced(server, tiny_vllm_lm())
    before = await engine.generate(ask("a", LONG, seed=1, ignore_eos=True))
    freed = await engine.release({"kv_cache"})
    waiting = asyncio.create_task(engine.generate(ask("b", LONG, seed=1, ignore_eos=True)))
    await asyncio.sleep(0.2)
    assert not waiting.done() and freed == await engine.restore({"kv_cache"})
    np.testing.assert_array_equal((await waiting).output_ids, before.output_ids)
    assert (await waiting).times.cached_tokens == 0


@pytest.mark.slow
async def test_tensor_parallel_workers_take_their_slices_and_prove_them(tmp_path: Path):
    """In bf16, with an untied head. Each worker reads the same transfers; both have the only KV head."""
    lm, other = (tiny_vllm_lm(seed, torch.bfloat16, tie_word_embeddings=False) for seed in range(2))
    with serving(lm, tmp_path / "model", tensor_model_parallel_size=2) as server:
        engine = await synced(server, lm, client_of(server))
        for version, model in ((1, other), (2, lm)):
            assert (await sync(model, engine, version)).read_back is True
            assert await distance(engine, model, LONG, f"a{version}") < 0.15


async def test_a_head_with_stale_packed_weights_is_named_by_the_read_back_proof(faulty):
    """The head is tied, so no sync names it; its logprobs would be wrong by nats, without an error."""
    engine = await synced(faulty, tiny_vllm_lm())  # the same weights as at its start, so the head is not stale
    with pytest.raises(SyncError, match=r"embed_tokens\.weight differs from the packed weight of lm_head"):
        await sync(tiny_vllm_lm(seed=1), engine, 1)
    with pytest.raises(StaleWeightsError):
        await engine.generate(ask("a", LONG))


async def test_requests_fail_with_the_reason_when_their_server_dies(faulty):
    engine = await synced(faulty, tiny_vllm_lm())
    children = psutil.Process(faulty._process.pid).children(recursive=True)
    workers = [process for process in children if process.name().startswith("VLLM")]  # its engine core and worker
    for process in workers:
        process.suspend()  # so that none is answered before the kill
    tasks = [asyncio.create_task(engine.generate(ask(str(i), LONG, max_new_tokens=310))) for i in range(8)]
    await asyncio.sleep(0.2)
    for process in workers:
        process.kill()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert workers and all(isinstance(error, EngineEnded) and "vllm has ended" in str(error) for error in errors)
    with pytest.raises(EngineEnded):
        await engine.generate(ask("late", LONG))
    await engine.close()


def test_a_server_that_does_not_start_is_reported_with_the_reason(tmp_path: Path):
    with (
        pytest.raises(EngineFailure, match=r"(?s)ended before it was ready.*--no-such-argument"),
        serving(tiny_vllm_lm(), tmp_path / "model", "--no-such-argument"),
    ):
        pass


@pytest.mark.slow
def test_the_cause_of_a_failed_engine_core_is_reported(tmp_path: Path):
    """The API server's own exception is "Engine core initialization failed. See root cause above."."""
    with (
        pytest.raises(
            EngineFailure, match=r"The first exception in its output is:\nValueError: No available memory for"
        ),
        serving(tiny_vllm_lm(), tmp_path / "model", "--kv-cache-memory-bytes=1024"),
    ):
        pass
