"""Decode attention in bf16 on a CPU and as on an accelerator, whose KV cache is in the dtype of the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_engines import ask, run, scores, tiny_engine
from tiny_models import tiny_lm, tiny_qwen2

from meshrl.core.types import Turn
from meshrl.model.recipe import cast_parameters
from meshrl.rollout.embedded import kv_cache
from meshrl.rollout.embedded.engine import EmbeddedEngine


def _biased_qwen2(common_score: float) -> torch.nn.Module:
    """A Qwen2 in bf16 whose query and key biases add nearly this number to every score: they are in the two dimensions
    of a head that its rotations hardly turn."""
    lm = tiny_qwen2(
        hidden_size=64, max_position_embeddings=1024, rope_parameters={"rope_type": "default", "rope_theta": 1e12}
    )
    for block in lm.model.layers:
        size = block.self_attn.head_dim
        for bias in (block.self_attn.q_proj.bias, block.self_attn.k_proj.bias):
            bias.data.view(-1, size)[:, size // 2 - 1] = (common_score * size**0.5) ** 0.5
    return cast_parameters(lm, torch.bfloat16)


def _answers(lm: torch.nn.Module, prompt_tokens: int) -> tuple[EmbeddedEngine, dict[str, Turn]]:
    rng = np.random.default_rng(0)
    engine = tiny_engine(lm, max_context_tokens=1024)
    prompts = [rng.integers(1, 64, size=prompt_tokens - 9 * i) for i in range(4)]
    return engine, run(engine, [ask(f"{i}", prompt, seed=i, max_new_tokens=40) for i, prompt in enumerate(prompts)])


def _store_as_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "cache_format", lambda device, dtype: (dtype, False))


@pytest.mark.parametrize("prompt_tokens", [100, 600], ids=["short rows", "rows for the fused kernel"])
@pytest.mark.parametrize("cache", ["CPU", "accelerator"])
def test_a_large_score_that_all_keys_share_does_not_separate_sampler_and_trainer(monkeypatch, cache, prompt_tokens):
    """Qwen2-7B has such key biases. Scores that are rounded to bf16 differ from the trainer's by up to 0.5 each."""
    if cache == "accelerator":
        _store_as_accelerators(monkeypatch)
    engine, turns = _answers(_biased_qwen2(196.0), prompt_tokens)
    off = []
    for turn in turns.values():
        ids = np.concatenate([turn.context_ids, turn.output_ids])
        off.append(np.abs(turn.logprobs - scores(engine._runner.model, ids)[len(turn.context_ids) :]))
    assert np.concatenate(off).mean() < 0.02


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_cache_of_an_accelerator_gives_the_numbers_of_the_cpus(monkeypatch, family):
    """One policy of dtypes for both, so that tests on a CPU are about the arithmetic of an accelerator: what follows
    from the cache's dtype alone is the order in which a product is summed, by which some CPUs round up to 3 of 40
    tokens to the next number in bf16. Another policy changes nearly all. gemma2: with softcaps and a window."""
    lm = _biased_qwen2(50.0) if family == "qwen2" else tiny_lm(family, torch.bfloat16)
    _, here = _answers(lm, 140)
    _store_as_accelerators(monkeypatch)
    engine, there = _answers(lm, 140)
    assert engine._runner.pool.layers[0][0].dtype == torch.bfloat16
    for name, turn in here.items():
        assert np.array_equal(turn.output_ids, there[name].output_ids)
    off = np.concatenate([np.abs(turn.logprobs - there[name].logprobs) for name, turn in here.items()])
    assert (off > 1e-5).mean() <= 0.2 and off.max() < 0.02
