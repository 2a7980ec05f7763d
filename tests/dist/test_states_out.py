"""What computes the states of layers (convolutions, decays) is trained, sent and proven like all weights."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from harness import engine_over
from synced_ranks import SyncedRank
from tiny_engines import scores, tiny_engine
from tiny_models import tiny_lm
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import sft_loss
from meshrl.core.errors import SyncError
from meshrl.train.packing import pack

OF_STATES = {
    "qwen3_next": [
        f"model.layers.0.linear_attn.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
    ],
    "lfm2": ["model.layers.0.conv.conv.weight"],
    "mamba2": [f"backbone.layers.0.mixer.{name}" for name in ("conv1d.bias", "A_log", "dt_bias", "D")],
    "minimax": ["model.layers.0.self_attn.slope_rate"],  # a buffer
}


def _synced(rank: int, world: int, family: str) -> dict[str, Any]:
    """Train a step and sync a sampler with other weights; then change each of OF_STATES in the sampler, and sync only
    changes: the errors."""
    trainer, sampler = engine_over(tiny_lm(family), world), tiny_engine(tiny_lm(family, seed=1), trusted=False)
    trainer.forward_backward([pack(weigh(random_samples(rank, [12, 30])), [0, 1])], sft_loss)
    trainer.optim_step(1e-2)
    synced = SyncedRank(trainer, sampler, transfer_bytes=1 << 16)
    asyncio.run(synced.reconcile())
    ack = asyncio.run(synced.sync(0))
    (row,) = random_samples(0, [20])
    row.mask[1:], row.temperature = True, 1.0
    scored = trainer.forward([pack([row], [0])])[0]
    theirs = {**dict(sampler._weights.lm.named_parameters()), **dict(sampler._weights.lm.named_buffers())}
    untrained = dict(tiny_lm(family).named_parameters())
    found = {
        "read_back": ack.read_back,
        "nats": float(np.abs(scores(sampler._runner.model, row.tokens) - scored).max()),
        "trained": [name in untrained and not torch.equal(theirs[name], untrained[name]) for name in OF_STATES[family]],
        "errors": [],
    }
    for version, name in zip(range(1, 99, 2), OF_STATES[family], strict=False):
        theirs[name].data.view(-1)[0] += 0.5
        try:
            asyncio.run(synced.sync(version))
            found["errors"].append("accepted")
        except SyncError as error:
            found["errors"].append(str(error))
            asyncio.run(synced.sync(version + 1))  # of all weights
    synced.close()
    return found


@pytest.mark.parametrize("family", OF_STATES)
def test_a_sampler_gets_what_computes_the_states_and_proves_it(pool, family):
    for found in pool.run(_synced, 2, family):
        assert found["read_back"] is True and found["nats"] < 1e-4
        assert found["trained"] == [family != "minimax"] * len(OF_STATES[family])
        for name, error in zip(OF_STATES[family], found["errors"], strict=True):
            assert f"{name} has digest" in error
