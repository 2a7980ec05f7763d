"""CausalModel compared with its Transformers model, and loading from a folder."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
from tiny_models import FAMILIES, tiny_lm, tiny_qwen2
from tiny_samples import random_samples

from meshrl.core.errors import ConfigError
from meshrl.model import attention, verify
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.fast_decoder import fast_decoder
from meshrl.model.hub_names import tied_names
from meshrl.model.recipe import Recipe, build_model, cast_parameters, load_causal_lm
from meshrl.train.packing import pack

CPU = torch.device("cpu")


def test_the_logprob_of_a_token_comes_from_the_position_before_it():
    """A model that always predicts this token + 1 gives a counting row logprobs of 0, and any other row lower
    ones."""
    lm = tiny_qwen2(tie=False)
    with torch.no_grad():
        for p in lm.parameters():
            p.zero_()
        lm.model.norm.weight.fill_(1.0)
        lm.model.embed_tokens.weight.copy_(torch.eye(64, 32))
        lm.lm_head.weight.copy_(torch.roll(torch.eye(64, 32), 1, dims=0) * 100)
    model = CausalModel(lm)

    def score(row: list[int]) -> torch.Tensor:
        (sample,) = random_samples(0, [len(row)])
        sample.tokens[:] = row
        batch, scored = pack([sample], [0]), torch.arange(1, len(row))
        context = PackedAttention(batch.cu_seqlens.tolist(), CPU, batch.parents)
        previous, ones = batch.previous[scored], torch.ones(len(scored))
        with torch.no_grad():
            return model(batch.tokens, batch.position_ids, context, scored, previous, ones, 4, False, {})[0]

    assert torch.equal(score([3, 4, 5, 6, 7]), torch.zeros(4))
    wrong = score([3, 4, 9, 10, 7])
    assert torch.equal(wrong < -100, torch.tensor([False, True, False, True]))


def test_casting_keeps_buffers_in_fp32_and_ties(tmp_path):
    """Rotary frequencies rounded to bf16 are radians off at long positions."""
    lm = cast_parameters(tiny_qwen2(tie=True), torch.bfloat16)
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    fresh = dict(tiny_qwen2().named_buffers())
    assert fresh
    for name, buffer in lm.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, fresh[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_folder_loads_as_it_was_saved(tmp_path, tie, dtype):
    """Parameters in the requested dtype, buffers in fp32, ties kept, and our attention."""
    saved = tiny_qwen2(tie=tie, attention_dropout=0.1)
    saved.save_pretrained(tmp_path)
    lm = load_causal_lm(tmp_path, dtype=dtype)
    for (name, p), (_, want) in zip(lm.named_parameters(), saved.named_parameters(), strict=True):
        assert torch.equal(p, want.to(dtype)), name
    for (name, buffer), (_, want) in zip(lm.named_buffers(), saved.named_buffers(), strict=True):
        assert torch.equal(buffer, want), name
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) == tie
    assert lm.config._attn_implementation == attention.NAME
    assert not any(module.training for module in lm.modules())
    assert not any(getattr(m, "attention_dropout", 0.0) for m in lm.modules())


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_a_model_in_bf16_is_compared_in_fp32_without_a_second_copy_of_it(tmp_path, family, monkeypatch):
    """Neither when it is loaded nor when its fast decoder is compared: at most one block is in fp32 at a time."""
    tiny_lm(family, num_hidden_layers=5).save_pretrained(tmp_path)
    widened, now, most = verify.widened, [0], [0]

    @contextmanager
    def counted(parameters, of_ids=()):
        parameters = list(parameters)
        count = sum(p.numel() for p in parameters if p.dtype == torch.bfloat16)
        with widened(parameters, of_ids):
            now[0] += count
            most[0] = max(most[0], now[0])
            yield
            now[0] -= count

    monkeypatch.setattr(verify, "widened", counted)
    model = build_model(tmp_path, Recipe(dtype=torch.bfloat16))
    places = {name: p.data_ptr() for name, p in model.lm.named_parameters()}
    fast = fast_decoder(model)
    block = sum(p.numel() for p in model.layers[0].parameters())
    total = sum(p.numel() for p in model.lm.parameters())
    assert total - 5 * block + block == most[0] and now == [0]
    assert {p.dtype for p in model.lm.parameters()} == {torch.bfloat16}
    assert places == {name: p.data_ptr() for name, p in model.lm.named_parameters()}
    assert (fast is not None) == (family == "qwen2")


def test_a_folder_saved_in_bf16_loads_its_buffers_in_fp32(tmp_path):
    """Most checkpoints are bf16; masters are made from them, but never rotary buffers."""
    cast_parameters(tiny_qwen2(), torch.bfloat16).save_pretrained(tmp_path)
    lm = load_causal_lm(tmp_path)
    assert {p.dtype for p in lm.parameters()} == {torch.float32}
    for (name, buffer), (_, want) in zip(lm.named_buffers(), tiny_qwen2().named_buffers(), strict=True):
        assert torch.equal(buffer, want), name


def test_a_folder_without_a_model_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path.*no config\.json"):
        load_causal_lm(tmp_path)


def test_tied_names_map_each_alias_to_the_name_that_is_sent():
    assert tied_names(tiny_qwen2(tie=True)) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_names(tiny_qwen2(tie=False)) == {}


def test_a_model_that_is_no_causal_language_model_is_refused_as_such(tmp_path):
    """Its own vocab_size is that of a full PaliGemma, which its weights do not fill."""
    tiny_qwen2().save_pretrained(tmp_path)
    facts = {"model_type": "paligemma", "vocab_size": 257152, "text_config": {"model_type": "gemma", "vocab_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="'paligemma', for which Transformers has no causal language model"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", [*FAMILIES, "afmoe"])
def test_a_row_alone_can_be_scored_at_any_length(family, dtype):
    """The attention of a single row needs no copy to be split into its heads, but a model may reshape its result."""
    model = CausalModel(cast_parameters(tiny_lm(family), dtype))
    for length in (1, 20, 64, 65):
        tokens = torch.arange(length) % 60
        hidden = model.hidden(tokens, torch.arange(length), PackedAttention([0, length], CPU))
        assert hidden.shape == (length, 32) and hidden.isfinite().all()


def test_dropout_is_off_in_modules_and_attributes(tmp_path):
    lm = tiny_lm("qwen2")
    lm.config.attention_dropout = 0.5
    lm.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path).train()
    assert {layer.self_attn.attention_dropout for layer in loaded.model.layers} == {0.0}
