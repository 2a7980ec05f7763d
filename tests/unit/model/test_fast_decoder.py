"""The sampler's fast decoder: equal to Transformers' modules, and not used for models where it would differ."""

import copy

import pytest
import torch
from tiny_models import FAMILIES, tiny_lm

from meshrl.config.model import LoraConfig
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.fast_decoder import fast_decoder
from meshrl.model.lora import add_adapters, randomize_adapters

FAST = {"qwen2", "llama", "qwen3", "mistral"}


def model_of(lm):
    return CausalModel(copy.deepcopy(lm).eval().requires_grad_(False))


def tokens_of(model, lengths=(40, 7, 1)):
    rows = [torch.randint(1, model.vocab_size, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return torch.cat(rows), torch.cat([torch.arange(n) for n in lengths]), PackedAttention(cu, torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_families_that_fit_get_an_equal_fast_decoder_and_others_get_none(family):
    model = model_of(tiny_lm(family))
    fast = fast_decoder(model)
    assert (fast is not None) == (family in FAST)
    if fast is not None:
        args = tokens_of(model)
        expected = model.hidden(*args)
        torch.testing.assert_close(fast.hidden(*args), expected, rtol=1e-5, atol=2e-5)
        for change in (fast.fuse, fast.pack, fast.unpack):
            change()
            torch.testing.assert_close(fast.hidden(*args), expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(model.hidden(*args), expected, rtol=0, atol=0)


@pytest.mark.parametrize("targets", [["all-linear"], ["v_proj", "down_proj"]])
@torch.inference_mode()
def test_a_model_with_adapters_is_computed_as_its_modules_do(targets):
    """Each part of a fused product may have its own adapter, or none."""
    lm = tiny_lm("qwen2")
    before = model_of(lm)
    add_adapters(lm, LoraConfig(enabled=True, rank=3, targets=targets), torch.float32, "tiny")
    randomize_adapters(lm)
    model = model_of(lm)
    fast = fast_decoder(model)
    assert fast is not None
    args = tokens_of(model)
    expected = model.hidden(*args)
    assert (expected - before.hidden(*args)).abs().max() > 0.01
    for change in (lambda: None, fast.fuse, fast.pack, fast.unpack):
        change()
        torch.testing.assert_close(fast.hidden(*args), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("part", ["norm", "rotation", "residual", "activation"])
def test_modules_with_the_right_names_but_other_arithmetic_get_no_fast_decoder(part, monkeypatch):
    """Module names do not determine the arithmetic; the probe tokens test it."""
    from transformers.models.qwen2 import modeling_qwen2 as qwen2

    if part == "norm":  # Gemma's weight is an offset from 1
        plain = qwen2.Qwen2RMSNorm.forward
        monkeypatch.setattr(qwen2.Qwen2RMSNorm, "forward", lambda self, x: plain(self, x) * (1 + 1 / self.weight))
    if part == "rotation":  # Cohere's pairs are neighbours
        monkeypatch.setattr(
            qwen2, "rotate_half", lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        )
    if part == "residual":  # Granite scales what a block adds
        block = qwen2.Qwen2DecoderLayer.forward
        monkeypatch.setattr(
            qwen2.Qwen2DecoderLayer, "forward", lambda self, x, *a, **k: x + 0.5 * (block(self, x, *a, **k) - x)
        )
    lm = tiny_lm("qwen2", hidden_act="gelu" if part == "activation" else "silu")
    assert fast_decoder(model_of(lm)) is None


@torch.inference_mode()
def test_fused_parameters_stay_the_models_own():
    """Names, ties and in-place loading still work, and both forwards compute with the loaded values."""
    model, other = (
        model_of(tiny_lm("qwen3", tie_word_embeddings=True)),
        tiny_lm("qwen3", tie_word_embeddings=True, seed=1),
    )
    fast, names = fast_decoder(model), [name for name, _ in model.named_parameters()]
    fast.fuse()
    assert [name for name, _ in model.named_parameters()] == names
    for p, q in zip(model.lm.parameters(), other.parameters(), strict=True):
        p.copy_(q)
    args = tokens_of(model)
    torch.testing.assert_close(fast.hidden(*args), model.hidden(*args), rtol=1e-5, atol=2e-5)
    expected = CausalModel(other.eval()).hidden(*args)
    torch.testing.assert_close(fast.hidden(*args), expected, rtol=1e-5, atol=2e-5)
