"""The embedded engine records the experts that its routers select for each token, for the trainer to replay."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import ask, run, tiny_engine
from tiny_models import tiny_lm, tiny_mixture

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.errors import ConfigError
from meshrl.core.types import Request, Turn
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.rollout.base import join_turns
from meshrl.rollout.embedded.engine import build_embedded_engine

CPU = torch.device("cpu")
GROUP = [5, 9, 13, 17, 40, 41, 7, 8, 9]
CONTEXTS = [GROUP, [33], GROUP, list(range(3, 60)) * 3, GROUP, [12, 50, 3]]


@pytest.fixture(scope="module")
def lm() -> torch.nn.Module:
    return tiny_mixture(num_experts=300)


def _engine(lm: torch.nn.Module, **changes: Any) -> Any:
    return tiny_engine(lm, records_routes=True, **changes)


def _selected(lm: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """int16[T, L, K]: of a forward of these tokens, without a cache."""
    chosen: list[torch.Tensor] = []
    hooks = [
        m.register_forward_hook(lambda _, args, out: chosen.append(out[2]))
        for m in lm.modules()
        if type(m).__name__.endswith("Router")
    ]
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        CausalModel(lm).hidden(tokens, torch.arange(len(ids)), PackedAttention([0, len(ids)], CPU))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy()


def _check(lm: torch.nn.Module, turn: Turn) -> None:
    """All but the last token, which the model has not computed."""
    routes, ids = turn.routed_experts, np.concatenate([turn.context_ids, turn.output_ids])
    assert routes is not None and routes.dtype == np.int16 and len(routes) == len(ids)
    assert (routes[-1] == -1).all()
    np.testing.assert_array_equal(routes[:-1], _selected(lm, ids)[:-1])


def test_each_token_has_the_experts_that_computed_it(lm):
    """Also where rows share a prompt, wait for a row, span several tiles, and move when others end; more than 256
    experts."""
    requests = [
        ask(str(i), c, seed=i, max_new_tokens=(40, 3, 140, 9, 20, 60)[i], ignore_eos=True)
        for i, c in enumerate(CONTEXTS)
    ]
    turns = run(_engine(lm, max_running=4), requests)
    for turn in turns.values():
        _check(lm, turn)
    assert max(int(turn.routed_experts.max()) for turn in turns.values() if turn.routed_experts is not None) > 255


def _part(lm: torch.nn.Module, request: Request, num_steps: int) -> Turn:
    """The turn so far, aborted while it runs together with other rows."""
    engine = _engine(lm)
    for each in (ask("other", [33], ignore_eos=True), request, ask("last", [8, 9], ignore_eos=True)):
        engine.submit(each)
    for _ in range(num_steps):
        engine.step()
    (_, turn), *others = engine._withdraw({request.id})
    assert not others and turn.stop_reason == "abort"
    return turn


def test_an_aborted_and_continued_turn_has_them_except_at_the_last_token_of_each_part(lm):
    request = ask("a", GROUP, seed=4, max_new_tokens=24, ignore_eos=True)
    first = _part(lm, request, 7)
    assert len(first.output_ids) == 7
    waiting = _part(lm, request, 0)
    assert waiting.routed_experts is None
    request.prefix_output = first.output_ids
    rest = run(_engine(lm), [request])["a"]
    joined = join_turns([first, rest])
    uninterrupted = run(_engine(lm), [ask("a", GROUP, seed=4, max_new_tokens=24, ignore_eos=True)])["a"]
    assert joined.output_ids.tolist() == uninterrupted.output_ids.tolist()
    cut = len(GROUP) + 6
    assert joined.routed_experts is not None and (joined.routed_experts[cut] == -1).all()
    joined.routed_experts[cut] = uninterrupted.routed_experts[cut]
    _check(lm, joined)


def test_rows_that_wait_for_new_weights_have_the_experts_of_their_new_cache(lm):
    """The cache is computed again, and so are the selections; memory is released and the queue starts again."""
    engine = _engine(lm)
    engine.submit(ask("a", GROUP, seed=4, max_new_tokens=9, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.drop_caches()
    turns: dict[str, Turn] = {}
    while engine.has_work:
        turns.update(engine.step())
    _check(lm, turns["a"])


@pytest.mark.parametrize("is_warm", [False, True], ids=["new engine", "engine that has answered"])
def test_a_step_that_raises_ends_its_requests_with_its_error_and_the_next_one_is_served(lm, is_warm, monkeypatch):
    """Rows that the step was to compute have no keys and no recorded experts."""

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    async def serve() -> Turn:
        engine = _engine(lm)
        if is_warm:
            await engine.generate(ask("first", GROUP))
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "_hidden", fails)
            requests = [engine.generate(ask("a", GROUP)), engine.generate(ask("b", [33]))]
            errors = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 30)
        assert [str(error) for error in errors] == ["out of memory"] * 2
        assert engine._runner.pool.num_bytes == 0
        return await asyncio.wait_for(engine.generate(ask("c", GROUP, seed=4)), 30)

    turn = asyncio.run(serve())
    _check(lm, turn)
    assert turn.output_ids.tolist() == run(_engine(lm), [ask("c", GROUP, seed=4)])["c"].output_ids.tolist()


def test_a_hybrid_mixture_has_them_too():
    """Its layers with a state take no part in the KV cache that has them."""
    hybrid = tiny_lm("qwen3_next")
    turns = run(_engine(hybrid), [ask(str(i), c, seed=i, ignore_eos=True) for i, c in enumerate(CONTEXTS)])
    for turn in turns.values():
        _check(hybrid, turn)


def test_nothing_is_recorded_by_default(lm):
    assert run(tiny_engine(lm), [ask("a", GROUP)])["a"].routed_experts is None


@pytest.mark.parametrize(
    ("family", "reason"), [("qwen2", "is no mixture of experts"), ("phimoe", "do not choose by torch.topk")]
)
def test_models_that_can_not_replay_are_refused_at_the_start(tmp_path, family, reason):
    tiny_lm(family).save_pretrained(tmp_path)
    model, rollout = ModelConfig(path=str(tmp_path), dtype="float32"), RolloutConfig(router_replay=True)
    with pytest.raises(ConfigError, match=reason):
        build_embedded_engine(model, rollout, CPU, "a", ())
