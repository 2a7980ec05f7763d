"""What a forward reads besides matrices is trained, sent, proven, saved and exported like them: what computes the
states of layers (convolutions, decays), and buffers that no optimizer updates, such as a router's bias."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import LORA, engine_over
from synced_ranks import SyncedRank
from test_checkpoint_reshard import save
from tiny_engines import scores, tiny_engine
from tiny_models import tiny_lm
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import sft_loss
from meshrl.core.errors import SyncError
from meshrl.model.hub_names import persistent_buffers
from meshrl.model.lora import add_adapters, init_adapters
from meshrl.model.recipe import load_causal_lm
from meshrl.train.packing import pack

EXPERTS = {"n_routed_experts": 10}  # rows that 4 ranks do not share evenly
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
OF_STATES = {
    "qwen3_next": [
        f"model.layers.0.linear_attn.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
    ],
    "lfm2": ["model.layers.0.conv.conv.weight"],
    "mamba2": [f"backbone.layers.0.mixer.{name}" for name in ("conv1d.bias", "A_log", "dt_bias", "D")],
    "minimax": ["model.layers.0.self_attn.slope_rate"],  # a buffer
}


def _synced(
    rank: int, world: int, family: str, altered: list[str], lora: bool = False, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train a step and sync a sampler with other weights; then change each of `altered` in the sampler, and sync only
    changes: what was found, and the errors."""
    lm, other = (tiny_lm(family, seed=seed, **(changes or {})) for seed in (0, 1))
    untrained = {name: p.detach().clone() for name, p in lm.named_parameters()}
    if lora:
        for model in (lm, other):
            add_adapters(model, LORA.model_copy(update={"targets": ["q_proj", "o_proj"]}), torch.float32, "")
            init_adapters(model)
    trainer, sampler = engine_over(lm, world), tiny_engine(other, trusted=False)
    trainer.forward_backward([pack(weigh(random_samples(rank, [12, 30])), [0, 1])], sft_loss)
    trainer.optim_step(1e-2)
    synced = SyncedRank(trainer, sampler, transfer_bytes=1 << 16)
    asyncio.run(synced.reconcile())
    ack = asyncio.run(synced.sync(0))
    own, buffers = persistent_buffers(trainer.model.lm), persistent_buffers(sampler._weights.lm)
    (row,) = random_samples(0, [20])
    row.mask[1:], row.temperature = True, 1.0
    scored = trainer.forward([pack([row], [0])])[0]
    theirs = {**dict(sampler._weights.lm.named_parameters()), **dict(sampler._weights.lm.named_buffers())}
    found = {
        "read_back": ack.read_back,
        "num_tensors": ack.num_tensors,
        "buffers": {t.name: t.dtype for t in synced.layout.tensors if t.name in own},
        "equal": own.keys() == buffers.keys() and all(torch.equal(own[name], buffers[name]) for name in own),
        "nats": float(np.abs(scores(sampler._runner.model, row.tokens) - scored).max()),
        "trained": [name in untrained and not torch.equal(theirs[name], untrained[name]) for name in altered],
        "errors": [],
    }
    for version, name in zip(range(1, 99, 2), altered, strict=False):
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
    for found in pool.run(_synced, 2, family, OF_STATES[family]):
        assert found["read_back"] is True and found["nats"] < 1e-4
        assert found["trained"] == [family != "minimax"] * len(OF_STATES[family])
        for name, error in zip(OF_STATES[family], found["errors"], strict=True):
            assert f"{name} has digest" in error


@pytest.mark.parametrize(
    ("world", "family", "lora"),
    [(1, "glm4_moe", False), (2, "deepseek_v3", False), (2, "glm4_moe", True), (4, "glm4_moe", False)],
)
def test_a_sampler_gets_the_buffers_that_its_forward_reads_and_proves_them(pool, world, family, lora):
    """A router's bias decides which experts compute. A sampler with another bias samples from another model,
    although all its parameters are right."""
    for found in pool.run(_synced, world, family, [BIAS], lora, EXPERTS):
        assert found["read_back"] is True and found["equal"]
        assert found["buffers"] == {BIAS: "float32"}
        assert found["nats"] < 1e-4
        (error,) = found["errors"]
        if world == 1:  # the trainer wrote the sampler's own memory again
            assert error == "accepted"
        else:
            assert f"1 of {found['num_tensors']} tensors differ" in error and f"{BIAS} has digest" in error


def _saved_and_exported(rank: int, world: int, family: str, folder: Path) -> dict[str, bool]:
    """Whether a changed bias is in the trainer's checkpoint and in its export."""
    trainer = engine_over(tiny_lm(family, **EXPERTS), world)
    persistent_buffers(trainer.model.lm)[BIAS].add_(1.0)
    want = persistent_buffers(trainer.model.lm)[BIAS]
    save(trainer, folder / "state")
    trainer.export(folder / "model")
    resumed = engine_over(tiny_lm(family, seed=1, **EXPERTS), world)
    resumed.load(folder / "state")
    exported = persistent_buffers(load_causal_lm(folder / "model", dtype=torch.bfloat16))
    return {
        "checkpoint": torch.equal(persistent_buffers(resumed.model.lm)[BIAS], want),
        "export": torch.equal(exported[BIAS], want),
    }


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_checkpoints_and_exports_keep_the_buffers_in_their_own_dtype(pool, tmp_path, family):
    assert pool.run(_saved_and_exported, 2, family, tmp_path) == [{"checkpoint": True, "export": True}] * 2
