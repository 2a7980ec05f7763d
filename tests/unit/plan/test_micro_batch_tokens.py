"""The default of train.max_tokens_per_microbatch, from what a forward pass stores by estimate."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import tiny_lm
from torch.autograd.graph import saved_tensors_hooks

from meshrl.config.model import ModelConfig
from meshrl.config.train import MOST_TOKENS, TrainConfig
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.limits import model_numbers
from meshrl.plan.decisions import FEWEST_TOKENS, micro_batch, stored_numbers
from meshrl.plan.sizes import merged

SMOL = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}


def tokens_of(folder, config, checkpointing, dtype="bfloat16"):
    (folder / "config.json").write_text(json.dumps(config))
    train = TrainConfig(activation_checkpointing=checkpointing)
    return micro_batch(ModelConfig(path=str(folder), dtype=dtype), train, model_numbers(str(folder))).value


def test_large_models_get_fewer_tokens_and_small_ones_the_most(tmp_path):
    assert tokens_of(tmp_path, SMOL, True, "float32") == MOST_TOKENS
    assert tokens_of(tmp_path, SMOL, False, "float32") == 2048 == tokens_of(tmp_path, SMOL, False) // 2
    assert tokens_of(tmp_path, SMOL, "selective", "float32") == 4096  # 6 H + 2 I
    assert tokens_of(tmp_path, SMOL, "submodule", "float32") == 8192  # 7 H
    assert tokens_of(tmp_path, SMOL, "every_2", "float32") == 4096  # about half of all and half of none
    assert tokens_of(tmp_path, SMOL, "block", "float32") == MOST_TOKENS
    seven_b = SMOL | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    assert tokens_of(tmp_path, seven_b, True) == MOST_TOKENS
    assert tokens_of(tmp_path, seven_b | {"num_hidden_layers": 320}, False) == FEWEST_TOKENS


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_estimate_is_near_what_autograd_stores(family):
    """Within a factor of two, because the result is a power of two."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
    lm = tiny_lm(family, **sizes)
    model, stored, length = CausalModel(lm), dict[int, torch.Tensor](), 64

    def keep(x: torch.Tensor) -> torch.Tensor:
        stored[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        context = PackedAttention([0, length], torch.device("cpu"))
        hidden = model.hidden(torch.arange(length) % 60 + 1, torch.arange(length), context)
    assert hidden.requires_grad
    parameters = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    num_bytes = sum(x.untyped_storage().nbytes() for at, x in stored.items() if at not in parameters)
    assert 0.5 < stored_numbers(lm.config) * 3 * 4 * length / num_bytes < 2


@pytest.mark.parametrize("limit", [0, 1, 7, 30, 10**9])
def test_neighbours_are_merged_up_to_the_limit(limit):
    """In order, each once; a group of several fits, and does not with its next neighbour's first one."""
    for sizes in ([], [5], [9, 1, 1, 1, 9], [3] * 24, [8, 8, 2, 2, 2, 30, 1]):
        groups = merged(sizes, limit)
        assert [i for own in groups for i in own] == list(range(len(sizes)))
        totals = [sum(sizes[i] for i in own) for own in groups]
        assert all(total <= limit or len(own) == 1 for total, own in zip(totals, groups, strict=True))
        assert all(total + sizes[own.start] > limit for total, own in zip(totals, groups[1:], strict=False))
