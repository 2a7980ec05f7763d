"""The maps are the weights with which the model's attention reads its values, of every family."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_lm

from meshrl.model import attention
from meshrl.model.attention_maps import SIDE, attention_maps, read_weights
from meshrl.model.causal import CausalModel

IDS = (np.arange(23) * 7 % 61 + 1).astype(np.int32)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma4_text", "granite", "cohere", "deepseek_v3", "gpt2")


class RecordedAttention(attention.PackedAttention):
    """meshrl's attention of one row, with what it reads and returns in each layer."""

    def __init__(self, num_tokens):
        super().__init__([0, num_tokens], torch.device("cpu"))
        self.calls = {}

    def attend(self, layer, q, k, v, spec):
        out = super().attend(layer, q, k, v, spec)
        self.calls[layer] = v, out
        return out


def weights_of(lm):
    found = {}
    read_weights(lm, torch.tensor(IDS, dtype=torch.int64), lambda layer, weights: found.update({layer: weights}))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_map_times_the_values_are_what_the_trainers_attention_returns(family):
    lm = tiny_lm(family)
    context = RecordedAttention(len(IDS))
    positions = torch.arange(len(IDS))
    with torch.no_grad():
        CausalModel(lm).hidden(torch.tensor(IDS, dtype=torch.int64), positions, context)
    weights = weights_of(lm)
    assert sorted(weights) == sorted(context.calls) == list(range(2))
    for layer, (v, out) in context.calls.items():
        heads = weights[layer].shape[0]
        values = v.repeat_interleave(heads // v.shape[1], 1)
        torch.testing.assert_close(torch.einsum("hqk,khd->qhd", weights[layer], values), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights[layer].sum(-1), torch.ones(heads, len(IDS)), atol=1e-5, rtol=0)
        assert not weights[layer].triu(1).any()
    assert lm.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_the_weights_are_those_that_transformers_returns(family):
    lm = tiny_lm(family)
    found = weights_of(lm)
    lm.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = lm(torch.tensor(IDS, dtype=torch.int64)[None], output_attentions=True).attentions
    for layer, weights in enumerate(theirs):
        torch.testing.assert_close(found[layer], weights[0], atol=1e-5, rtol=0)


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)
    more = dict(num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
    lm = GptOssForCausalLM(
        GptOssConfig(**sizes, **more, initializer_range=0.2, layer_types=None, pad_token_id=0)
    ).eval()
    for name, p in lm.named_parameters():
        if name.endswith("sinks"):
            p.data.normal_(0, 2)
    lm.set_attn_implementation("eager")
    return lm


def test_weights_next_to_a_sink_are_the_softmax_over_the_keys_and_the_sink():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    lm, by_hand = gpt_oss(), {}

    def attend(module, query, key, value, mask, scaling, **_):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        behind = torch.arange(len(IDS))[:, None] - torch.arange(len(IDS))
        window = module.sliding_window or len(IDS)
        scores = (query @ key.mT * scaling).masked_fill((behind < 0) | (behind >= window), float("-inf"))
        total = scores.exp().sum(-1, keepdim=True) + module.sinks.exp()[None, :, None, None]
        by_hand[module.layer_idx] = scores.exp() / total
        return (by_hand[module.layer_idx] @ value).transpose(1, 2), None

    found = weights_of(lm)
    ALL_ATTENTION_FUNCTIONS.register("by_hand", attend)
    lm.set_attn_implementation("by_hand")
    with torch.no_grad():
        lm(torch.tensor(IDS, dtype=torch.int64)[None])
    for layer, weights in by_hand.items():
        torch.testing.assert_close(found[layer], weights[0], atol=1e-5, rtol=0)
    lm.set_attn_implementation("eager")
    for layer, maps in enumerate(attention_maps(lm, IDS).layers):
        expected = 1 - by_hand[layer][0].sum(-1).mean(-1)
        np.testing.assert_allclose(maps.unshown, expected.detach().numpy(), atol=1e-5)
        assert expected.max() > 0.1


def test_a_layer_without_softmax_attention_has_no_map():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4)
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    config = Qwen3NextConfig(**sizes, **linear, **experts, num_key_value_heads=2, head_dim=8)
    lm = Qwen3NextForCausalLM._from_config(config, attn_implementation="eager").eval()
    maps = attention_maps(lm, IDS)
    assert [layer is None for layer in maps.layers] == [kind != "full_attention" for kind in config.layer_types]
    assert None in maps.layers and maps.num_heads == 4


def test_bytes_are_the_root_of_the_weights_and_the_last_map_is_the_mean_of_the_heads():
    lm = tiny_lm("llama")
    exact, maps = weights_of(lm), attention_maps(lm, IDS)
    assert (maps.block, maps.side, maps.num_heads) == (1, len(IDS), 4)
    for layer, shown in enumerate(maps.layers):
        assert shown.weights.shape == (5, 23, 23) and shown.weights.dtype == np.uint8 and shown.unshown is None
        values = (shown.weights / 255.0) ** 2
        wanted = torch.cat([exact[layer], exact[layer].mean(0, keepdim=True)]).numpy()
        assert (np.abs(values - wanted) <= 0.004 * np.sqrt(wanted) + 4e-6).all()


def test_a_long_row_has_the_largest_weight_of_each_block():
    ids = (np.arange(SIDE + 4) * 7 % 61 + 1).astype(np.int32)
    lm = tiny_lm("llama", num_hidden_layers=1)
    found = {}
    read_weights(lm, torch.tensor(ids, dtype=torch.int64), lambda layer, weights: found.update({layer: weights}))
    maps = attention_maps(lm, ids)
    side = SIDE // 2 + 2
    assert (maps.block, maps.side) == (2, side)
    largest = found[0].reshape(4, side, 2, side, 2).amax((2, 4)).numpy()
    np.testing.assert_allclose((maps.layers[0].weights[:4] / 255.0) ** 2, largest, atol=5e-3)


def test_the_values_of_many_heads_stay_within_a_limit():
    maps = attention_maps(tiny_lm("llama"), IDS, max_values=2 * 4 * 100)
    assert (maps.block, maps.side) == (3, 8)
