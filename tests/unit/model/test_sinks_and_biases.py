"""Models with attention sinks or position biases: logprobs and gradients are Transformers' own, packed and after shared
prompts, and the embedded engine samples what `generate` does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import ask, plain, run, tiny_engine
from tiny_samples import random_samples

from meshrl.core.types import Sample
from meshrl.model import attention, attention_kernels
from meshrl.model.attention import NAMES, PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.train.packing import pack

_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **_WINDOWS},
    "granite_swa": {**_WINDOWS},
    "mimo_v2_flash": {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
}


def tiny(model_type: str, implementation: str = "auto") -> Any:
    """All its weights are random, and large enough to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **{**sizes, **heads, **tokens, **MODELS[model_type]})
    config.use_cache = False
    torch.manual_seed(0)
    name = NAMES.get(implementation, implementation)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    lm.config._attn_implementation = name
    with torch.no_grad():
        for p in lm.parameters():
            p.copy_(0.2 * torch.randn_like(p) + (p if p.ndim == 1 and p.min() == 1 else 0))
    return lm


def _samples() -> list[Sample]:
    """Four answers to one prompt of nine tokens."""
    samples = random_samples(3, [9 + n for n in (5, 1, 30, 5)], groups=1)
    for s in samples:
        s.prefix_len, s.mask, s.temperature = 9, np.arange(len(s)) >= 9, 1.0
        s.tokens[:9] = samples[0].tokens[:9]
    return samples


def _theirs(lm: Any, samples: list[Sample]) -> list[torch.Tensor]:
    """Logprobs of each answer, row by row."""
    lm.config._attn_implementation, name = "eager", lm.config._attn_implementation
    rows = [torch.from_numpy(s.tokens.astype(np.int64)) for s in samples]
    logprobs = [torch.log_softmax(lm(row[None]).logits[0], -1)[:-1].gather(1, row[1:, None])[8:, 0] for row in rows]
    lm.config._attn_implementation = name
    return logprobs


def _ours(lm: Any, samples: list[Sample], share_prefix: bool) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """Logprobs of each answer in one pack, and the kernel of each layer."""
    batch = pack(samples, list(range(len(samples))), share_prefix=share_prefix)
    scored = batch.mask.nonzero()[:, 0]
    context = PackedAttention(batch.cu_seqlens.tolist(), torch.device("cpu"), batch.parents)
    inputs = batch.tokens, batch.position_ids, context, scored, batch.previous[scored], batch.temperature[scored]
    logprobs, _ = CausalModel(lm)(*inputs, 64, False, {})
    row_of = torch.tensor(batch.rows)[torch.searchsorted(batch.cu_seqlens, scored, right=True) - 1]
    return [logprobs[row_of == i] for i in range(len(samples))], context.used


def _gradients(lm: Any, logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    lm.zero_grad(set_to_none=True)
    sum(x.square().sum() for x in logprobs).backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def _compare(lm: Any, share_prefix: bool) -> dict[int, Any]:
    samples = _samples()
    want = _theirs(lm, samples)
    want_gradients = _gradients(lm, want)
    got, used = _ours(lm, samples, share_prefix)
    gradients = _gradients(lm, got)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - want_gradients[name]).norm() <= 1e-5 * want_gradients[name].norm(), name
    return used


@pytest.mark.parametrize("share_prefix", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize("model_type", MODELS)
def test_logprobs_and_gradients_are_those_of_transformers_row_by_row(model_type, share_prefix):
    _compare(tiny(model_type), share_prefix)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex"])
@pytest.mark.parametrize("model_type", ["granite_swa"])
def test_each_implementation_computes_sinks_and_biases(model_type, implementation, monkeypatch):
    """flex_attention without compilation, and without torch's refusal of a backward pass on CPUs."""
    monkeypatch.setattr(attention, "_no_flex", lambda device: "")
    monkeypatch.setattr(attention_kernels, "compiled", lambda function: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    used = _compare(tiny(model_type, implementation), True)
    assert set(used.values()) == {(implementation, "")}


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_answers_are_those_of_generate(model_type):
    lm = tiny(model_type)
    prompts = [list(range(5, 5 + n)) for n in (9, 3, 20)]
    requests = [ask(str(i), prompt, temperature=0.0, max_new_tokens=24) for i, prompt in enumerate(prompts)]
    turns = run(tiny_engine(lm), requests)
    theirs = plain(lm)
    for i, prompt in enumerate(prompts):
        want = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert turns[str(i)].output_ids.tolist() == want[0, len(prompt) :].tolist()
