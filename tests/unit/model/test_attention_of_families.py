"""Families with attention of their own kind: sinks, position biases, own code, rotations that depend on the length.

Logprobs and gradients are Transformers' own, packed and after shared prompts, and the embedded engine samples what
`generate` does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engines import ask, differences, plain, run, tiny_engine
from tiny_packs import answers_to_one_prompt, plain_logprobs, score_pack

from meshrl.config.model import ModelConfig, num_positions
from meshrl.config.train import TrainConfig
from meshrl.model import attention
from meshrl.model.attention import NAMES, OWN_CODE
from meshrl.model.causal import CausalModel
from meshrl.model.costs import model_memory
from meshrl.model.own_attention import use_context_attention
from meshrl.model.parts import eager_attention
from meshrl.model.recipe import load_causal_lm
from meshrl.parallel.checkpointing import checkpoint_blocks

_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_ROPE = {"rope_theta": 1e4, "factor": 2.0}
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0] * 4, "rope_theta": 1e4}
MODELS: dict[str, dict[str, Any]] = {  # model type -> special fields; a number after the type is no part of it
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **_WINDOWS},
    "granite_swa": {**_WINDOWS},
    "mimo_v2_flash": {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "falcon": {},
    "falcon 2": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon 3": {"multi_query": False},
    "bloom": {"n_layer": 2, "n_head": 4},
    "bloom 2": {"n_layer": 2, "hidden_size": 48, "n_head": 6},
    "nemotron": {},
    "stablelm": {},
    "stablelm 2": {"qk_layernorm": True, "use_parallel_residual": True},
    "llama": {"rope_parameters": {"rope_type": "dynamic", **_ROPE}},
    "phi3": {"rope_parameters": _LONG, "original_max_position_embeddings": 64},
    "llama 2": {"rope_parameters": {**_LONG, "factor": 4.0, "original_max_position_embeddings": 64}},
}


def tiny(model_type: str, implementation: str = "auto") -> Any:
    """All its weights are random, and large enough to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    family = model_type.split()[0]
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **{**sizes, **heads, **tokens, **MODELS[model_type]})
    config.use_cache = False
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if family in OWN_CODE:
        use_context_attention(lm, implementation)
    lm.config._attn_implementation = NAMES[implementation]
    with torch.no_grad():
        for p in lm.parameters():
            p.copy_(0.2 * torch.randn_like(p) + (p if p.ndim == 1 and p.min() == 1 else 0))
    return lm


SAMPLES = answers_to_one_prompt(3, 9, [5, 1, 30, 5])


def _gradients(lm: Any, logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    lm.zero_grad(set_to_none=True)
    sum(x.square().sum() for x in logprobs).backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def _compare(lm: Any, share_prefix: bool) -> dict[int, Any]:
    model = CausalModel(lm)
    with eager_attention(lm, model.parts):
        want = plain_logprobs(lm, SAMPLES, 9)
        want_gradients = _gradients(lm, want)
    got, context = score_pack(model, SAMPLES, share_prefix)
    gradients = _gradients(lm, got)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - want_gradients[name]).norm() <= 1e-5 * want_gradients[name].norm(), name
    return context.used


@pytest.mark.parametrize("share_prefix", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize("model_type", MODELS)
def test_logprobs_and_gradients_are_those_of_transformers_row_by_row(model_type, share_prefix):
    _compare(tiny(model_type), share_prefix)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["granite_swa", "bloom 2"])
def test_each_implementation_computes_sinks_and_biases(model_type, implementation):
    used = _compare(tiny(model_type, implementation), True)
    assert set(used.values()) == {(implementation, "")}


def _greedy(model_type: str, lengths: tuple[int, ...], count: int) -> int:
    """The number of greedy tokens that are compared with those of `generate`, up to one that rounding may decide."""
    lm, compared = tiny(model_type), 0
    prompts = [list(range(5, 5 + n)) for n in lengths]
    requests = [ask(str(i), prompt, temperature=0.0, max_new_tokens=count) for i, prompt in enumerate(prompts)]
    turns, theirs = run(tiny_engine(lm), requests), plain(lm)
    for i, prompt in enumerate(prompts):
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        out = theirs.generate(torch.tensor([prompt]), output_logits=True, return_dict_in_generate=True, **options)
        margins = [float(step[0].topk(2).values.diff().abs()) for step in out.logits]
        want = out.sequences[0, len(prompt) :].tolist()
        for got, token, margin in zip(turns[str(i)].output_ids.tolist(), want, margins, strict=True):
            if margin < 1e-4:
                break
            assert got == token
            compared += 1
    return compared


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_answers_are_those_of_generate(model_type):
    assert _greedy(model_type, (9, 3, 20), 24) > 40


def test_position_biases_reach_over_the_tiles_of_the_cache():
    lm = tiny("bloom")
    turn = run(tiny_engine(lm), [ask("a", range(5, 14), max_new_tokens=160)])["a"]
    assert differences(lm, turn).max() < 2e-4


@pytest.mark.parametrize("model_type", MODELS)
def test_a_folder_of_the_family_is_loaded_and_passes_the_comparison_with_transformers(model_type, tmp_path):
    lm = tiny(model_type)
    lm.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path)
    _compare(loaded, True)
    memory = model_memory(ModelConfig(path=str(tmp_path), dtype="float32"), TrainConfig(), 1)
    assert memory.weights == 4 * sum(p.numel() for p in lm.parameters())


@pytest.mark.parametrize("model_type", ["nemotron", "bloom", "gptj"])
def test_a_checkpointed_block_is_computed_again_with_the_rows_of_its_own_pack(model_type):
    """Two packs are scored before the first one's backward pass."""
    lm = tiny(model_type)
    model = CausalModel(lm)
    want = _gradients(lm, score_pack(model, SAMPLES)[0])
    checkpoint_blocks(list(model.layers), True)
    first = score_pack(model, SAMPLES)[0]
    score_pack(model, SAMPLES[:2], share_prefix=False)
    for name, gradient in _gradients(lm, first).items():
        assert torch.equal(gradient, want[name]), name


def test_rows_that_longrope_rotates_otherwise_are_refused():
    """Their rotations would differ from those of shorter rows in their pack, and from those they were sampled with."""
    short = {
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope"},
        "original_max_position_embeddings": 64,
    }
    assert num_positions(short) == 64
    assert num_positions({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic"}}) == 4096
    layers = {"sliding_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32}}
    assert num_positions({"max_position_embeddings": 4096, "rope_parameters": layers}) == 32
    assert num_positions({"rope_parameters": layers}) is None
