"""`train.activation_checkpointing`: each mode computes the gradients of `false`, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import LORA, engine_over
from tiny_models import tiny_lm, tiny_mixture, tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.core.errors import ConfigError
from meshrl.model.causal import CausalModel
from meshrl.model.lora import add_adapters, randomize_adapters
from meshrl.parallel.checkpointing import checkpoint_blocks
from meshrl.parallel.fsdp import local_shard

MODES = [True, "block", "every_2", "submodule", "selective"]
MODELS: dict[str, Any] = {
    "tied": lambda: tiny_qwen2(),
    "norms of heads, LoRA": lambda: _with_adapters(tiny_lm("qwen3")),
    "mixture": lambda: tiny_mixture(),
    "four norms, softcap": lambda: tiny_lm("gemma2"),
    "shared expert": lambda: tiny_lm("qwen2_moe"),
    "experts with biases": lambda: tiny_lm("gpt_oss"),
    "layers with a state": lambda: tiny_lm("qwen3_next"),
}
LENGTHS = [12, 3, 40, 7, 90, 21, 2, 30]  # rows of more than 64 tokens take SDPA


def _with_adapters(lm: torch.nn.Module) -> torch.nn.Module:
    add_adapters(lm, LORA, torch.float32, "tiny")
    randomize_adapters(lm)
    return lm


def gradients(rank: int, world: int, name: str, settings: dict[str, Any], dtype: torch.dtype) -> list[dict[str, Any]]:
    """For each mode after `false`: the shards of all gradients after two micro-batches, and metrics."""
    results = []
    for mode in (False, *MODES):
        engine = engine_over(MODELS[name](), world, {**settings, "activation_checkpointing": mode}, dtype)
        at, samples = engine.coordinates, weigh(random_samples(0, LENGTHS))
        rows = list(range(len(samples)))[at.data_index :: at.num_data]
        batches = [engine.pack([samples[i] for i in micro], micro) for micro in (rows[:1], rows[1:])]
        out = engine.forward_backward(batches, make_policy_loss(AlgoConfig()))
        grads = {n: local_shard(p.grad) for n, p in engine.model.lm.named_parameters() if p.grad is not None}
        results.append({"grads": grads, "metrics": {m.name: m.sum for m in out.metrics}})
    return results


CASES = [
    ("tied", 1, {}, torch.bfloat16),
    ("tied", 2, {}, torch.bfloat16),
    ("tied", 2, {"sharding_strategy": "SHARD_GRAD_OP"}, torch.float32),
    ("tied", 2, {"mesh": {"tp": 2}}, torch.bfloat16),
    ("tied", 2, {"mesh": {"ulysses": 2}}, torch.float32),
    ("norms of heads, LoRA", 2, {}, torch.bfloat16),
    ("mixture", 1, {"router_aux_loss_coef": 0.1}, torch.float32),
    ("mixture", 2, {"router_aux_loss_coef": 0.1}, torch.bfloat16),
    ("shared expert", 1, {}, torch.float32),
    ("experts with biases", 1, {}, torch.bfloat16),
    ("four norms, softcap", 2, {}, torch.float32),
    ("layers with a state", 1, {}, torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{'-'.join(case[2])}-{case[3]}")
def test_each_mode_has_the_gradients_of_false_to_the_bit(pool: Any, case: tuple[Any, ...]):
    """The mixture's routers choose the same experts when they are computed again, and count nothing."""
    name, world, settings, dtype = case
    for want, *found in pool.run(gradients, world, name, settings, dtype):
        assert all(np.isfinite(value) for value in want["metrics"].values())
        for mode, got in zip(MODES, found, strict=True):
            assert got["grads"].keys() == want["grads"].keys()
            different = [n for n, grad in want["grads"].items() if not torch.equal(got["grads"][n], grad)]
            assert different == [] and got["metrics"] == want["metrics"], mode


@pytest.mark.parametrize(
    ("family", "children"),
    [("mamba", "MambaBlock has norm, mixer"), ("opt", "OPTDecoderLayer has self_attn, activation_fn, ")],
)
def test_a_block_without_an_mlp_of_its_own_is_refused_with_the_names_of_its_modules(family: str, children: str):
    model = CausalModel(tiny_lm(family))
    with pytest.raises(ConfigError, match=f"{children}.*Use block or selective"):
        checkpoint_blocks(model.blocks, "submodule")
