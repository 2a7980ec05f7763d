"""Dtypes, buffers and ties in all stages of a train engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine_over
from model_families import config_of
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import sft_loss
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import ConfigError
from meshrl.core.types import POLICY, REFERENCE, RoleSpec
from meshrl.model.causal import CausalModel
from meshrl.model.recipe import Recipe, load_causal_lm
from meshrl.parallel.fsdp import full_tensor, shard_model
from meshrl.parallel.mesh import build_mesh, fsdp_mesh
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.tools.model_check.small_model import write_random_model
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack


def _away_from_zero() -> torch.nn.Module:
    """All parameters are at least 0.1 in size: bf16's next number is at least 5e-4 away, hundreds of steps at lr
    1e-6."""
    lm = tiny_qwen2()
    for p in lm.parameters():
        p.data += 0.1 * torch.where(p >= 0, 1.0, -1.0)
    return lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    _away_from_zero().save_pretrained(path)
    return path


def _built(world: int, folder: Path, dtype: str, role: RoleSpec = POLICY, **train: Any) -> TrainEngine:
    cfg = TrainConfig(**train)
    mesh = build_mesh(cfg.mesh_shape(world), "cpu")
    return TrainEngine.build(ModelConfig(path=str(folder), dtype=dtype), cfg, mesh, role)


def _step(engine: TrainEngine, rank: int, lr: float = 1e-6) -> None:
    samples = weigh(random_samples(rank, [9, 5]))
    engine.forward_backward([pack(samples, [0, 1])], sft_loss)
    assert not engine.optim_step(lr).skipped


def _dtypes(engine: TrainEngine) -> dict[str, set[torch.dtype]]:
    state = [t for slot in engine.optimizer.state.values() for t in slot.values() if t.ndim] if engine.optimizer else []
    return {
        "parameters": {p.dtype for p in engine.model.parameters()},
        "moments": {t.dtype for t in state},
        "buffers": {b.dtype for b in engine.model.buffers()},
        "wire": {getattr(torch, dtype) for _, dtype in engine.weights().tensors.values()},
    }


def _dtypes_in_rank(rank: int, world: int, folder: Path, dtype: str) -> list[dict[str, set[torch.dtype]]]:
    engine = _built(world, folder, dtype)
    seen = [_dtypes(engine)]
    gradients: set[torch.dtype] = set()
    samples = weigh(random_samples(rank, [9, 5]))
    engine.forward_backward([pack(samples, [0, 1])], sft_loss)
    gradients |= {p.grad.dtype for p in engine.model.parameters()}
    engine.optim_step(1e-6)
    seen.append({**_dtypes(engine), "gradients": gradients})
    reference = _built(world, folder, dtype, role=REFERENCE)
    seen.append({"reference": _dtypes(reference)["parameters"], "buffers": _dtypes(reference)["buffers"]})
    return seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masters_moments_and_gradients_are_fp32_and_the_wire_has_the_compute_dtype(pool, folder, dtype):
    """After build and after step 1, for policy and reference."""
    compute, fp32 = {getattr(torch, dtype)}, {torch.float32}
    built, stepped, reference = pool.run(_dtypes_in_rank, 2, folder, dtype)[0]
    assert built == {"parameters": fp32, "moments": set(), "buffers": fp32, "wire": compute}
    assert stepped == {"parameters": fp32, "moments": fp32, "buffers": fp32, "wire": compute, "gradients": fp32}
    assert reference == {"reference": compute, "buffers": fp32}


def _buffers_in_rank(rank: int, world: int, folder: Path, dtype: str, role: RoleSpec) -> dict[str, Any]:
    engine = _built(world, folder, dtype, role=role)
    if role == POLICY:
        _step(engine, rank)
    return {name: b.numpy().copy() for name, b in engine.model.lm.named_buffers()}


@pytest.mark.parametrize(("dtype", "role"), [("bfloat16", POLICY), ("bfloat16", REFERENCE), ("float32", POLICY)])
def test_buffers_equal_a_fresh_fp32_models(pool, folder, dtype, role):
    """After build, sharding and a step, on 1 and 2 ranks, for policy and reference."""
    fresh = dict(load_causal_lm(folder).named_buffers())
    assert fresh
    for world in (1, 2):
        for got in pool.run(_buffers_in_rank, world, folder, dtype, role):
            assert got.keys() == fresh.keys()
            assert all((got[name] == b.numpy()).all() for name, b in fresh.items())


def test_buffers_of_the_bf16_sampler_equal_a_fresh_fp32_models(folder):
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    engine = build_embedded_engine(model, RolloutConfig(), torch.device("cpu"), "s", ())
    held = dict(engine._weights.lm.named_buffers())
    fresh = dict(load_causal_lm(folder).named_buffers())
    assert held.keys() == fresh.keys() and all(torch.equal(held[name], b) for name, b in fresh.items())
    assert {p.dtype for p in engine._weights.lm.parameters()} == {torch.bfloat16}


def _ties_in_rank(rank: int, world: int, tie: bool, strategy: str) -> list[bool]:
    engine = engine_over(tiny_qwen2(tie=tie), world, {"sharding_strategy": strategy})
    lm = engine.model.lm
    seen = []

    def look() -> None:
        seen.append(lm.lm_head.weight is lm.model.embed_tokens.weight)

    look()
    samples = weigh(random_samples(rank, [9, 5]))
    engine.forward([pack(samples, [0, 1])])
    look()
    engine.forward_backward([pack(samples, [0, 1])], sft_loss)
    look()
    engine.optim_step(0.01)
    look()
    held = engine.weights()
    look()
    assert ("lm_head.weight" in held.tensors) != tie, "a tied head is sent once, under its embedding's name"
    assert held.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tie else {})
    head, embedding = full_tensor(lm.lm_head.weight), full_tensor(lm.model.embed_tokens.weight)
    assert torch.equal(head, embedding) == tie
    return seen


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_tied_weights_stay_one_parameter_at_every_stage(pool, tie, strategy):
    """After build, forward, backward, step and sync."""
    assert pool.run(_ties_in_rank, 2, tie, strategy) == [[tie] * 5] * 2


def _tied_in_two_groups(rank: int, world: int) -> str:
    model = CausalModel(tiny_qwen2(tie=True))
    mesh = build_mesh((1, world, 1, 1), "cpu")
    groups = [[model.lm.model.embed_tokens], *([layer] for layer in model.layers)]
    with pytest.raises(ValueError, match="shared with a parameter already managed") as error:
        shard_model(model, groups, fsdp_mesh(mesh), compute_dtype=torch.float32, reshard_after_forward=True)
        _step(TrainEngine(model, mesh, TrainConfig(), POLICY, Recipe(mesh=mesh, trains=True)), rank)
    return str(error.value)


def test_tied_weights_in_two_groups_are_refused(pool):
    """So a grouping that splits a tie is an error."""
    assert all("lm.model.embed_tokens.weight" in message for message in pool.run(_tied_in_two_groups, 2))


def test_layers_of_an_unknown_kind_are_refused_by_name(tmp_path):
    """Packed rows and the KV cache would mix up what they keep of the past."""
    write_random_model(config_of("llama4_text"), tmp_path)
    with pytest.raises(ConfigError, match="layers of kind chunked_attention"):
        load_causal_lm(tmp_path)
