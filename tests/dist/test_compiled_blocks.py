"""train.torch_compile: the same logprobs and gradients, without a compilation for each length of a pack."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import check, engine_over, partitioned, random_partition, unsharded
from test_lora import with_adapters
from test_mesh_equal import data_ranks, mesh, size
from tiny_models import tiny_lm
from tiny_samples import random_groups, random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.core.errors import ConfigError
from meshrl.model.causal import CausalModel
from meshrl.model.recipe import compile_blocks

LOSS = make_policy_loss(AlgoConfig(entropy_coef=0.01))


def _graphs_after_each_pack(rank: int, world: int) -> list[int]:
    """Traced without code generation, which takes a minute."""
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        engine = engine_over(tiny_lm("llama", num_hidden_layers=3), world, {"torch_compile": True})
    counts = []
    for seed, lengths in enumerate([[12, 3, 20, 7], [40, 9, 2], [5, 5, 5, 17, 33], [64]]):
        samples = weigh(random_samples(seed, lengths)) + random_groups(seed, [9], [1, 12, 5])
        engine.forward_backward([engine.pack(samples, range(len(samples)))], LOSS)
        counts.append(stats["unique_graphs"])
    return counts


@pytest.mark.slow
def test_blocks_of_a_kind_and_packs_of_any_length_share_their_graphs(pool: Any):
    """Norm, then projections before attention, then those after it, then the rest of the block."""
    assert pool.run(_graphs_after_each_pack, 1) == [[4] * 4]


def _refusals(rank: int, world: int) -> list[str]:
    from torch._inductor import config

    texts = []
    for family, device, missing in (
        ("llama", "cpu", patch.object(config.cpp, "cxx", ("no-such-compiler",))),
        ("llama", "cpu", patch("sysconfig.get_path", lambda name: "/no/such/folder")),
        ("llama", "meta", patch.object(importlib.util, "find_spec", lambda name: None)),
        ("qwen3_moe", "cpu", nullcontext()),
        ("lfm2", "cpu", nullcontext()),
    ):
        model = CausalModel(tiny_lm(family))
        with missing, pytest.raises(ConfigError) as error:
            compile_blocks(model, torch.device(device), False)
        texts.append(str(error.value))
    return texts


def test_what_cannot_be_compiled_is_refused(pool: Any):
    (texts,) = pool.run(_refusals, 1)
    reasons = ["C++ compiler", "no /no/such/folder/Python.h", "Triton", "routers of experts", "layers with a state"]
    for text, reason in zip(texts, reasons, strict=True):
        assert reason in text and "Set train.torch_compile=false" in text


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "shards, tied, checkpointed": (tiny_lm, {"family": "qwen3", "tie_word_embeddings": True}, mesh(dp_shard=2)),
    "adapters, ulysses": (with_adapters, {"dtype": torch.float32}, mesh(ulysses=2)),
    "tp": (tiny_lm, {"family": "qwen3"}, mesh(tp=2)),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_compiled_blocks_have_the_same_logprobs_and_gradients(pool: Any, monkeypatch: Any, case: tuple[Any, Any, Any]):
    monkeypatch.setattr(pool, "timeout_s", 900)
    make, args, train = case
    samples = weigh(random_samples(1, [12, 3, 20, -6, 7])) + random_groups(6, [9], [1, 12, 5])
    partition = random_partition(np.random.default_rng(0), len(samples), data_ranks(train), 2)
    compiled = {**train, "torch_compile": True, "activation_checkpointing": True}
    got = pool.run(partitioned, size(train), make, args, samples, partition, LOSS, compiled)
    check(got, unsharded(make(**args), samples, LOSS), torch.float32)
