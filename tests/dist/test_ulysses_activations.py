"""Under Ulysses each rank stores the activations of its own chunk of a row only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import engine_over, worst
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.parallel.fsdp import full_tensor

NARROW = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_key_value_heads=4)
BYTES_OF_LOSS = 64  # of a token: each rank computes the loss of all tokens


def _one_row(rank: int, world: int, num_tokens: int) -> dict[str, Any]:
    """The gradient and logprobs of one row, and the bytes that autograd stores between forward and backward pass."""
    train = {"mesh": {"ulysses": world}, "activation_checkpointing": False}
    engine = engine_over(tiny_qwen2(**NARROW), world, train)
    batch = engine.pack(weigh(random_samples(0, [num_tokens])), [0])
    storages: dict[int, int] = {}

    def stored(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(stored, lambda x: x):
        logprobs = engine.forward_backward([batch], make_policy_loss(AlgoConfig())).logprobs[0]
    grads = {n: full_tensor(p.grad).numpy().copy() for n, p in engine.model.lm.named_parameters()}
    return {"grads": grads, "logprobs": logprobs, "stored": sum(storages.values())}


@pytest.mark.parametrize(
    "num_tokens", [2048, pytest.param(32768, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=["2k", "32k"]
)
def test_four_ranks_store_a_quarter_of_a_long_rows_activations_each(
    pool: Any, num_tokens: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool, "timeout_s", 500.0)
    (alone,) = pool.run(_one_row, 1, num_tokens)
    for rank in pool.run(_one_row, 4, num_tokens):
        distance, name = worst(rank["grads"], alone["grads"])
        assert distance < 1e-5, f"{name} is {distance:.2e} of its norm off"
        np.testing.assert_allclose(rank["logprobs"], alone["logprobs"], atol=1e-5)
        assert 0 < rank["stored"] - alone["stored"] / 4 < BYTES_OF_LOSS * num_tokens
