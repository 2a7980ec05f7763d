"""Models with a vision tower: the gradient of rows with and without images does not depend on which rank has which."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from harness import STRATEGIES, check, partitioned, unsharded, worst
from tiny_models import widen
from tiny_samples import weigh
from vision_families import FAMILIES, reference_logits, row, tiny_vision_lm

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.model import ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, Sample
from meshrl.model import attention
from meshrl.model.parts import is_vision
from meshrl.parallel.fsdp import full_tensor, local_shard
from meshrl.parallel.mesh import build_mesh
from meshrl.train.engine import TrainEngine

LOSS = make_policy_loss(AlgoConfig(entropy_coef=0.01))
FP64 = {"dtype": torch.float64}


def ours(**model: Any) -> Any:
    """The model with the attention of packed rows."""
    lm = widen(tiny_vision_lm(**model, **FP64))
    attention.register()
    lm.config._attn_implementation = {"vision_config": "sdpa", "text_config": attention.NAME}
    return lm


def _rows(family: str) -> list[Sample]:
    """Rows with no image, one, and two of different size; and a group of three whose prompt has an image."""
    small, large = ((size, seed) for seed, size in enumerate(FAMILIES[family].sizes))
    prompts = [[5], [3, small, 4], [9], [2, large, small, 3], *[[2, large, 4]] * 3]
    rows = [row(family, f"row {i}", prompt, 4 + i, seed=min(i, 4)) for i, prompt in enumerate(prompts)]
    draw = np.random.default_rng(0)
    for s in rows:
        s.group_id = s.trajectory_id if s is not rows[5] and s is not rows[6] else rows[4].trajectory_id
        s.advantages = np.where(s.mask, draw.standard_normal(len(s)), 0).astype(np.float32)
        s.rollout_logprobs = np.where(s.mask, -2, np.nan).astype(np.float32)
        s.old_logprobs = np.where(s.mask, -2, 0).astype(np.float32)
    return weigh(rows)


# In each micro-batch a rank has images and another has none: text alone, or no row at all; the last has none anywhere.
MIXED = [[[1, 4, 5], [], [2]], [[], [6, 3], [0]]]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llava", torch.float64), ("qwen3_vl", torch.float32), ("gemma3", torch.float32)],
    ids=lambda value: str(value),
)
def test_ranks_with_and_without_images_have_the_gradient_of_one_rank(pool, family, dtype):
    """In fp64 to 1e-10. Towers of Qwen rotate in fp32 whatever the dtype, and Gemma's norms compute in it."""
    rows = _rows(family)
    want = unsharded(widen(tiny_vision_lm(family, **FP64)), rows, LOSS, partial(reference_logits, family))
    check(pool.run(partitioned, 2, ours, {"family": family}, rows, MIXED, LOSS, {}), want, dtype)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_sharding_strategy_trains_a_tower(pool, strategy):
    rows = _rows("llava")
    want = unsharded(widen(tiny_vision_lm("llava", **FP64)), rows, LOSS, partial(reference_logits, "llava"))
    train = {"sharding_strategy": strategy, "activation_checkpointing": True, **STRATEGIES[strategy]}
    partition = [[[1], [0]], [[], [3, 2]], [[4, 5, 6], []], [[], []]]
    check(pool.run(partitioned, 4, ours, {"family": "llava"}, rows, partition, LOSS, train), want, torch.float64)


def frozen(rank: int, world: int, folder: str, rows: list[Sample]) -> dict[str, Any]:
    """One optimizer step; then what it left of the tower."""
    cfg = TrainConfig()
    model = ModelConfig(path=folder, dtype="float32", vision="freeze")
    engine = TrainEngine.build(model, cfg, build_mesh(cfg.mesh_shape(world), "cpu"), POLICY)
    is_tower = [is_vision(name, engine.model.parts) for name, _ in engine.model.lm.named_parameters()]
    before = [local_shard(p).clone() for p in engine.model.lm.parameters()]
    batches = [
        engine.pack([rows[i] for i in micro], micro, has) for micro, has in zip(MIXED[rank], (True, True, False))
    ]
    engine.forward_backward(batches, LOSS)
    grads = {n: full_tensor(p.grad).numpy() for n, p in engine.model.lm.named_parameters() if p.grad is not None}
    engine.optim_step(1e-3)
    states = [p in engine.optimizer.state for p in engine.model.lm.parameters()]
    same = [torch.equal(local_shard(p), old) for p, old in zip(engine.model.lm.parameters(), before, strict=True)]
    return {"grads": grads, "tower": is_tower, "states": states, "same": same, "frozen": sorted(engine.frozen())}


def test_a_frozen_tower_has_no_gradient_and_no_optimizer_state(pool, tmp_path):
    rows, lm = _rows("qwen3_vl"), tiny_vision_lm("qwen3_vl", freezes=True)
    lm.save_pretrained(tmp_path)
    want = unsharded(lm, rows, LOSS, partial(reference_logits, "qwen3_vl"))
    assert not any("visual" in name for name in want["grads"])
    for rank in pool.run(frozen, 2, str(tmp_path), rows):
        distance, name = worst(rank["grads"], want["grads"])
        assert distance < 1e-5, name
        assert any(rank["tower"]) and not any(state for state, of in zip(rank["states"], rank["tower"]) if of)
        assert all(same for same, of in zip(rank["same"], rank["tower"]) if of)
        assert len(rank["frozen"]) == sum(rank["tower"])
