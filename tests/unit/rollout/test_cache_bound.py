"""The embedded engine's keys and values stay within their limit in bytes, which changes no answer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tiny_engines import ask, run, tiny_engine
from tiny_models import tiny_lm

from meshrl.core.errors import RequestError
from meshrl.core.types import Request, Turn, turn_seed
from meshrl.rollout.embedded import engine as embedded_engine
from meshrl.rollout.embedded.engine import EmbeddedEngine

TOKEN = 2 * 2 * 2 * 8 * 4  # bytes: layers, keys and values, heads, head size, fp32
PAGE = 64  # tokens


@pytest.fixture(scope="module")
def lm() -> torch.nn.Module:
    return tiny_lm("qwen2")


def _requests(seed: int) -> list[Request]:
    """Groups with one prompt, some of their members apart; rows of 1 to 5 pages."""
    rng = random.Random(seed)
    contexts = [[rng.randrange(64) for _ in range(rng.choice((1, 30, 128, 200)))] for _ in range(4)]
    requests = [
        ask(f"{i}/{g}", context, seed=turn_seed(seed, i, g, 0), max_new_tokens=rng.choice((1, 9, 30, 70)))
        for i, context in enumerate(contexts)
        for g in range(4)
    ]
    rng.shuffle(requests)
    return requests


def _run(engine: EmbeddedEngine, requests: list[Request], flush_every: int = 0) -> tuple[dict[str, Turn], int, int]:
    """The turns, the most rows at a time, and the most bytes of the pages. flush_every: steps between two flushes, as
    those of a sync, after which running requests continue; half of the requests come later, between the others."""
    turns: dict[str, Turn] = {}
    pending, rows, peak, steps = list(requests), 0, 0, 0
    while pending or engine.has_work:
        for request in pending[: 16 if not steps else 1]:
            engine.submit(request)
        pending = pending[16 if not steps else 1 :]
        turns.update(engine.step())
        steps += 1
        rows, peak = max(rows, engine.stats().running), max(peak, engine._runner.num_bytes)
        if flush_every and steps % flush_every == 0:
            engine.drop_caches()
        assert steps < 3000, "no progress"
    assert engine._runner.table.num_used == 0
    return turns, rows, peak


@pytest.mark.parametrize(("seed", "flush_every"), [(0, 0), (1, 17)])
def test_the_limit_holds_and_changes_no_token(lm: torch.nn.Module, seed: int, flush_every: int) -> None:
    """Shared prompts, forks of one context, and requests that continue after a sync: all end, with the same tokens."""
    requests = _requests(seed) + [ask(f"late {r.id}", r.context_ids, seed=r.seed) for r in _requests(seed)[:6]]
    loose, most_rows, most_bytes = _run(tiny_engine(lm, max_context_tokens=512), requests)
    row = 5 * PAGE * TOKEN  # the longest request alone
    for limit in (row, 2 * row):
        assert limit < most_bytes
        engine = tiny_engine(lm, max_context_tokens=512, kv_cache_bytes=limit)
        turns, rows, peak = _run(engine, requests, flush_every)
        assert peak <= limit and rows < most_rows
        for name, turn in loose.items():
            assert turns[name].output_ids.tolist() == turn.output_ids.tolist()
            np.testing.assert_allclose(turns[name].logprobs, turn.logprobs, atol=1e-5)


def test_rows_wait_for_pages_and_not_for_all_that_they_may_sample(lm: torch.nn.Module) -> None:
    """A request that may sample much takes as many pages as it samples."""
    requests = [ask(str(i), [i], max_new_tokens=200, temperature=0.0) for i in range(8)]
    stop = run(tiny_engine(lm), [requests[0]])["0"].output_ids[3]
    limit = 6 * PAGE * TOKEN
    engine = tiny_engine(lm, kv_cache_bytes=limit, stop_token_ids=(int(stop),))
    turns, rows, peak = _run(engine, requests)
    loose, _, _ = _run(tiny_engine(lm, stop_token_ids=(int(stop),)), requests)
    assert rows == 5 and peak == limit
    assert all(turns[name].output_ids.tolist() == turn.output_ids.tolist() for name, turn in loose.items())


def test_a_long_request_gets_the_pages_of_a_prompt_that_another_one_waits_for(lm: torch.nn.Module) -> None:
    short = [ask(f"short {i}", [5] * 100, seed=i, max_new_tokens=20) for i in range(3)]
    requests = [*short[:2], ask("long", [3] * 300, max_new_tokens=9), short[2]]
    turns, rows, peak = _run(tiny_engine(lm, max_context_tokens=512, kv_cache_bytes=5 * PAGE * TOKEN), requests)
    assert len(turns) == 4 and rows == 2 and peak == 5 * PAGE * TOKEN
    loose, _, _ = _run(tiny_engine(lm, max_context_tokens=512), requests)
    assert all(turns[name].output_ids.tolist() == loose[name].output_ids.tolist() for name in turns)


def test_a_request_that_can_never_fit_is_refused(lm: torch.nn.Module) -> None:
    engine = tiny_engine(lm, kv_cache_bytes=2 * PAGE * TOKEN)
    engine.submit(ask("fits", [3] * 100, max_new_tokens=29))
    text = (
        r"request long can never fit: the keys, values and states of its 129 tokens need 49,152 bytes, and 32,768 "
        r"bytes are available \(rollout.embedded.kv_cache_bytes: 32768\)"
    )
    with pytest.raises(RequestError, match=text):
        engine.submit(ask("long", [3] * 100, max_new_tokens=30))
    assert len(engine.step()) == 0 and engine.stats().waiting == 0


def test_the_default_follows_the_free_memory_of_an_accelerator(
    lm: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured again after a flush, when a trainer may have freed or taken memory; a CPU has no limit."""
    engine = tiny_engine(lm)
    assert engine._runner.bound.num_bytes is None
    free = {"device": 1000, "reserved": 500, "allocated": 300}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (free["device"], 10**6))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: free["reserved"])
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: free["allocated"])
    engine._runner.bound._device = torch.device("meta")
    assert engine._runner.bound.num_bytes == 960  # 80 % of 1,200
    with pytest.raises(RequestError, match=r"960 bytes are available .*: 80% of the device's free memory\)"):
        engine.submit(ask("a", [3]))
    free["device"] = 10**6
    assert engine._runner.bound.num_bytes == 960
    engine.drop_caches()
    assert engine._runner.bound.num_bytes == 800_160


def test_memory_of_dropped_caches_is_returned_when_nothing_refers_to_it(lm: torch.nn.Module, monkeypatch) -> None:
    """A rank that only samples does so at each sync."""
    engine, held = tiny_engine(lm), list[int]()
    monkeypatch.setattr(
        embedded_engine, "return_freed_memory", lambda device: held.append(engine._runner.pool.num_bytes)
    )
    engine.submit(ask("a", [3]))
    engine.step()
    assert engine._runner.pool.num_bytes > 0
    engine.drop_caches()
    assert held == [0]


def test_the_bytes_of_a_token_are_those_of_the_pages_where_others_were_assumed() -> None:
    """Layers of JetMoe have more heads than its config has of keys and values."""
    engine = tiny_engine(tiny_lm("jetmoe"), kv_cache_bytes=10**6)
    engine.submit(ask("a", [3]))
    assert engine._runner.bound._token_bytes == 2 * TOKEN
    engine._runner.bound._token_bytes = TOKEN
    engine.step()
    engine.submit(ask("b", [3]))
    engine.step()
    assert engine._runner.bound._token_bytes == 2 * TOKEN == engine._runner.pool.token_bytes


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_the_states_of_a_row_count_after_the_first_row_has_run_alone(family: str) -> None:
    """Nothing states their bytes before; a model whose layers all have states has no keys and values."""
    model = tiny_lm(family)
    requests = [ask(str(i), [5, 3, i], seed=i, max_new_tokens=6) for i in range(6)]
    loose, most_rows, most_bytes = _run(tiny_engine(model), requests)
    limit = most_bytes // 2
    engine = tiny_engine(model, kv_cache_bytes=limit)
    for request in requests:
        engine.submit(request)
    engine.step()
    assert engine.stats().running == 1 and engine._runner.pool.row_bytes > 0
    turns, rows, peak = _run(engine, [])
    assert peak <= limit and (most_rows, rows) == (6, 3 if family == "mamba2" else 2)  # one page stays free
    assert all(turns[name].output_ids.tolist() == turn.output_ids.tolist() for name, turn in loose.items())
    engine = tiny_engine(model, kv_cache_bytes=engine._runner.pool.row_bytes - 1)
    engine.submit(requests[0])
    engine.step()
    with pytest.raises(RequestError, match="can never fit"):
        engine.submit(requests[1])
