"""Buffers that a forward reads and no optimizer updates, such as a router's bias: they are sent, proven, saved and
exported like weights."""

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
from tiny_samples import random_samples

from meshrl.core.errors import SyncError
from meshrl.model.hub_names import persistent_buffers
from meshrl.model.lora import add_adapters, init_adapters
from meshrl.model.recipe import load_causal_lm
from meshrl.train.packing import pack

FAMILIES = ["glm4_moe", "deepseek_v3"]
EXPERTS = {"n_routed_experts": 10}  # rows that 4 ranks do not share evenly
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def _synced(rank: int, world: int, family: str, lora: bool) -> dict[str, Any]:
    """Sync a sampler with other weights; then change the sampler's bias and sync only changes: results, and the
    error."""
    lm, other = tiny_lm(family, **EXPERTS), tiny_lm(family, seed=1, **EXPERTS)
    if lora:
        for model in (lm, other):
            add_adapters(model, LORA.model_copy(update={"targets": ["q_proj", "o_proj"]}), torch.float32, "")
            init_adapters(model)
    trainer, sampler = engine_over(lm, world), tiny_engine(other, trusted=False)
    synced = SyncedRank(trainer, sampler, transfer_bytes=1 << 16)
    asyncio.run(synced.reconcile())
    ack = asyncio.run(synced.sync(0))
    own, theirs = persistent_buffers(trainer.model.lm), persistent_buffers(sampler._weights.lm)
    (row,) = random_samples(0, [20])
    row.mask[1:], row.temperature = True, 1.0
    scored = trainer.forward([pack([row], [0])])[0]
    found = {
        "read_back": ack.read_back,
        "num_tensors": ack.num_tensors,
        "names": {t.name: t.dtype for t in synced.layout.tensors if t.name in own},
        "equal": own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own),
        "nats": float(np.abs(scores(sampler._runner.model, row.tokens) - scored).max()),
    }
    theirs[BIAS][3] += 0.5
    try:
        asyncio.run(synced.sync(1))
        found["altered"] = "accepted"
    except SyncError as error:
        found["altered"] = str(error)
    synced.close()
    return found


@pytest.mark.parametrize(
    ("world", "family", "lora"),
    [(1, "glm4_moe", False), (2, "deepseek_v3", False), (2, "glm4_moe", True), (4, "glm4_moe", False)],
)
def test_a_sampler_gets_the_buffers_that_its_forward_reads_and_proves_them(pool, world, family, lora):
    """A router's bias decides which experts compute. A sampler with another bias samples from another model,
    although all its parameters are right."""
    for found in pool.run(_synced, world, family, lora):
        assert found["read_back"] is True and found["equal"]
        assert found["names"] == {BIAS: "float32"}
        assert found["nats"] < 1e-4
        if world == 1:  # the trainer wrote the sampler's own memory again
            assert found["altered"] == "accepted"
        else:
            assert (
                f"1 of {found['num_tensors']} tensors differ" in found["altered"]
                and f"{BIAS} has digest" in found["altered"]
            )


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


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_and_exports_keep_the_buffers_in_their_own_dtype(pool, tmp_path, family):
    assert pool.run(_saved_and_exported, 2, family, tmp_path) == [{"checkpoint": True, "export": True}] * 2
