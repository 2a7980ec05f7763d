"""The formula of model FLOPs: by hand, against the operations that PyTorch counts, and what it must not depend on."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_lm
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshrl.config.model import LoraConfig
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.costs import _PEAKS, model_flops, peak_flops
from meshrl.model.lora import add_adapters, init_adapters

LENGTH, SCORED = 48, 40


class SquareAttention(PackedAttention):
    """Attention as plain products of all queries with all keys, which FlopCounterMode counts on any device."""

    def attend(self, layer, q, k, v, spec):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
        mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.mT * spec.scale).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).contiguous()


def counted(lm):
    """FLOPs of the forward and backward pass of one row, of which SCORED tokens have a logprob."""
    model, tokens = CausalModel(lm), torch.arange(LENGTH) % 60 + 1
    scored = torch.arange(LENGTH - SCORED, LENGTH)
    with FlopCounterMode(display=False) as counter:
        logprobs, _ = model(
            tokens,
            torch.arange(LENGTH),
            SquareAttention([0, LENGTH], torch.device("cpu")),
            scored,
            scored - 1,
            torch.ones(SCORED),
            SCORED,
            False,
            {},
        )
        logprobs.sum().backward()
    return counter.get_total_flops()


def square(flops):
    """The formula for attention that computes all pairs, as SquareAttention does."""
    pairs = LENGTH * LENGTH * sum(flops.pair.values())
    parts = flops.token * LENGTH, flops.scored * SCORED, pairs
    return sum(part * passes for part, passes in zip(parts, flops.passes, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "qwen3_moe", "deepseek_v3", "gpt2"])
def test_the_formula_agrees_with_the_operations_that_pytorch_counts(family):
    # With its softcap the head is computed again in the backward pass, which is no model FLOP.
    lm = tiny_lm(family, **({"final_logit_softcapping": None} if family == "gemma2" else {}))
    lm.set_experts_implementation("eager")  # PyTorch does not count grouped products
    assert square(model_flops(lm)) == pytest.approx(counted(lm), rel=0.02)


def test_frozen_weights_have_no_weight_gradient():
    lm = tiny_lm("llama", num_hidden_layers=6)
    full = model_flops(lm)
    add_adapters(lm, LoraConfig(enabled=True, rank=4), torch.float32, "tiny")
    init_adapters(lm)
    flops = model_flops(lm)
    assert flops.token > full.token and flops.scored == full.scored  # the adapters are computed, too
    assert 2 < flops.passes[0] < full.passes[0] == 3 and flops.passes[1:] == (2, 3) and full.passes[1:] == (3, 3)
    # The gradient of the first block's input is not needed: 1/6 of a third of the frozen products.
    assert square(flops) == pytest.approx(counted(lm), rel=0.08)


def test_adapters_of_experts_are_counted_for_the_experts_of_a_token():
    lm = tiny_lm("qwen3_moe")
    full = model_flops(lm).token
    add_adapters(lm, LoraConfig(enabled=True, rank=4, targets=["experts"]), torch.float32, "tiny")
    config = lm.config
    inner, hidden, chosen = config.moe_intermediate_size, config.hidden_size, config.num_experts_per_tok
    of_an_expert = 4 * (hidden + 2 * inner) + 4 * (inner + hidden)
    assert model_flops(lm).token == full + 2 * config.num_hidden_layers * chosen * of_an_expert


def test_the_formula_by_hand():
    lm = tiny_lm("mistral")  # hidden 32, 2 layers, 4 heads and 2 key heads of size 8, mlp 48, vocabulary 64, window 6
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    flops = model_flops(lm)
    assert flops.token == 2 * 2 * layer and flops.scored == 2 * 32 * 64
    assert flops.pair == {6: 2 * 2 * 4 * 16}
    seen = sum(min(position, 6) for position in range(1, 11))
    assert flops.of_row(10, 4, trains=False) == flops.token * 10 + flops.scored * 4 + flops.pair[6] * seen
    assert flops.of_row(10, 4, trains=True) == 3 * flops.of_row(10, 4, trains=False)


def test_a_layer_without_a_window_sees_all_earlier_tokens():
    flops = model_flops(tiny_lm("gemma2"))
    assert sorted(flops.pair, key=str) == [6, None]
    assert flops.of_row(9, 0, False) == 9 * flops.token + flops.pair[None] * 45 + flops.pair[6] * (21 + 18)


def test_a_layer_type_decides_where_each_layer_has_the_size_of_the_window():
    """In Exaone 4, layers of full attention have the attribute too, and do not use it."""
    types = ["sliding_attention", "full_attention"]
    flops = model_flops(tiny_lm("exaone4", sliding_window=6, layer_types=types, num_hidden_layers=2))
    assert sorted(flops.pair, key=str) == [6, None]


def test_the_peak_of_a_cpu_is_measured_and_special_names_come_before_general_ones():
    assert 1e7 < peak_flops(torch.device("cpu"), torch.float32) < 1e15
    names = list(_PEAKS)
    assert not [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if a in b]
    assert np.isfinite(list(_PEAKS.values())).all()


def test_a_model_with_other_mixers_than_attention_has_no_formula():
    """A metric that is not known must not end a run."""
    for kind in ("qwen3_next", "mamba2", "jamba"):
        config = CONFIG_MAPPING[kind]()
        config.num_hidden_layers = 4
        with torch.device("meta"):
            assert model_flops(AutoModelForCausalLM.from_config(config)) is None


def test_an_attention_that_names_its_head_size_in_another_way_is_known():
    config = CONFIG_MAPPING["gpt_neox"](
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64
    )
    with torch.device("meta"):
        flops = model_flops(AutoModelForCausalLM.from_config(config))
    assert flops is not None and flops.pair == {None: 2 * 2 * 4 * (8 + 8)}
