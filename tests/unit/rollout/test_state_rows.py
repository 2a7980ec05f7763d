"""The embedded engine's rows of models whose layers pass a state from token to token."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny_engines import ask, layout_of, run, scores, sync, tiny_engine
from tiny_models import tiny_lm

FAMILIES = ["qwen3_next", "lfm2", "minimax", "mamba2"]  # states of both kinds, a convolution alone, a matrix alone


def greedy(name: str, length: int, count: int, first: int = 0):
    return ask(name, [(first + 5 * i) % 61 + 3 for i in range(length)], temperature=0, max_new_tokens=count)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_keep_their_states_when_they_move(family: str):
    """Rows join, leave, are moved and copied from a shared prompt; each turn equals that of its request alone."""
    lm = tiny_lm(family)
    requests = [greedy(str(i), *shape, first=i) for i, shape in enumerate([(9, 4), (5, 24), (9, 9), (1, 30)])]
    requests += [greedy(f"group {i}", 7, 12 + 5 * i) for i in range(4)]
    turns = run(tiny_engine(lm, max_running=3), requests)
    for request in requests:
        alone = run(tiny_engine(lm), [request])[request.id]
        assert turns[request.id].output_ids.tolist() == alone.output_ids.tolist()
        np.testing.assert_allclose(turns[request.id].logprobs, alone.logprobs, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_state_survives_a_sync(family: str):
    """Requests that run meanwhile continue with the new weights; their tokens have exactly the logprobs of these."""
    old, new = tiny_lm(family), tiny_lm(family, seed=1)
    engine = tiny_engine(old)
    await engine.reconcile(layout_of(new))
    running = [asyncio.create_task(engine.generate(greedy(str(i), 6, 40, first=i))) for i in range(3)]
    while engine.stats().decode_tokens < 20:
        await asyncio.sleep(0)
    ack = await sync(new, engine, 1)
    assert ack.read_back
    for turn in await asyncio.gather(*running):
        after = turn.versions == 1
        assert after.any() and not after.all()
        ids = np.concatenate([turn.context_ids, turn.output_ids])
        want = scores(new, ids)[len(turn.context_ids) :]
        np.testing.assert_allclose(turn.logprobs[after], want[after], atol=1e-4)


def test_the_memory_of_states_is_counted_and_freed():
    engine = tiny_engine(tiny_lm("mamba2"))  # it has no keys and values
    engine.submit(greedy("0", 5, 4))
    engine.step()
    used = engine._runner.num_bytes
    assert used > 0 and asyncio.run(engine.release({"kv_cache"})) == used
    assert engine._runner.num_bytes == 0


def test_the_limit_of_the_cache_counts_states():
    engine = tiny_engine(tiny_lm("mamba2"))
    run(engine, [greedy("first", 5, 2)])
    row = engine._runner.pool.row_bytes
    assert row == engine._runner.num_bytes // len(engine._runner.pool.states[0]["conv_states"])
    engine = tiny_engine(tiny_lm("mamba2"), kv_cache_bytes=3 * row)
    engine.submit(greedy("first", 5, 9))
    engine.step()
    for i in range(6):
        engine.submit(greedy(str(i), 6, 9, first=i))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats().running, len(engine._runner.pool.states[0]["conv_states"]))
    assert most == 3


def test_the_limit_of_the_cache_counts_the_states_that_a_group_shares():
    """Some members wait for a row, so the states after their context are retained."""
    engine = tiny_engine(tiny_lm("mamba2"))
    run(engine, [greedy("first", 5, 2)])
    limit = 4 * engine._runner.pool.row_bytes
    engine = tiny_engine(tiny_lm("mamba2"), kv_cache_bytes=limit)
    run(engine, [greedy("first", 5, 1)])
    for i in range(9):
        engine.submit(greedy(str(i), 6, 9))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine._runner.num_bytes)
    assert engine._runner.snapshots.num_state_rows == 1 and most <= limit


def test_tables_of_decays_are_used_in_the_dtype_of_tokens_and_stay_in_fp32():
    """MiniMax's layers have them as buffers, which no cast of parameters reaches."""
    lm = tiny_lm("minimax").to(torch.bfloat16)
    decays = {name: b.float() for name, b in lm.named_buffers() if "decay" in name or "slope" in name}
    assert decays
    for name, wide in decays.items():
        lm.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = wide
    engine = tiny_engine(lm)
    turns = run(engine, [greedy("a", 5, 4)])
    assert len(turns["a"].output_ids) == 4
    assert {engine._runner.model.lm.get_buffer(name).dtype for name in decays} == {torch.float32}
