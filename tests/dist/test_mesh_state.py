"""Weights and optimizer state under tensor parallelism and Ulysses: the checks at the start, syncs, checkpoints that
another mesh continues, and exported folders."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import LORA
from synced_ranks import SyncedRank
from test_checkpoint_reshard import save
from test_mesh_equal import mesh
from tiny_engines import tiny_engine
from tiny_models import tiny_lm
from tiny_samples import random_groups

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import ConfigError
from meshrl.core.types import POLICY
from meshrl.model.lora import add_adapters, init_adapters, named_weights
from meshrl.model.recipe import load_causal_lm
from meshrl.model.tensor_parallel import PLANS
from meshrl.parallel.fsdp import full_tensor
from meshrl.parallel.mesh import build_mesh
from meshrl.train.checkpoint_files import state_folder
from meshrl.train.engine import TrainEngine

MODELS: dict[str, dict[str, Any]] = {
    "adapters, tied, words that tp does not divide": {"family": "qwen3", "vocab_size": 65, "tie_word_embeddings": True},
    "fused experts": {"family": "qwen3_moe", "tie_word_embeddings": False, "hidden_size": 64},
}
ONE_RANK, TP, BOTH = mesh(), mesh(dp_shard=2, tp=2), mesh(ulysses=2, tp=2)


def _engine(folder: Path, train: dict[str, Any], lora: LoraConfig, world: int) -> TrainEngine:
    """From the folder, with all checks of a start."""
    cfg = TrainConfig(**train, optimizer={"eps": 1e-3})  # a gradient that is noise makes no step
    device_mesh = build_mesh(cfg.mesh_shape(world), "cpu")
    return TrainEngine.build(ModelConfig(path=str(folder), dtype="float32", lora=lora), cfg, device_mesh, POLICY)


def _steps(
    rank: int, world: int, folder: Path, out: Path, trains: list[dict[str, Any]], lora: LoraConfig, sync: bool
) -> dict[str, Any]:
    """Two optimizer steps on each mesh in turn; each continues the checkpoint of the one before. Then an export."""
    samples = random_groups(6, [9, 5], [1, 12, 5])
    results: dict[str, Any] = {"logprobs": [], "norms": []}
    for number, train in enumerate(trains):
        engine = _engine(folder, train, lora, world)
        if number:
            engine.load(state_folder(out, number - 1))
        at = engine.coordinates
        for _ in range(2):
            rows = list(range(len(samples)))[at.data_index :: at.num_data]
            batches = [engine.pack([samples[i] for i in rows], rows)]
            logprobs = engine.forward_backward(batches, make_policy_loss(AlgoConfig())).logprobs
            results["logprobs"].append(logprobs)
            results["norms"].append(engine.optim_step(0.01).grad_norm)
            engine.release()
            assert engine.memory()["params"] == 0
            engine.restore()
        save(engine, state_folder(out, number))
    results["weights"] = {name: full_tensor(p.detach()).clone() for name, p in named_weights(engine.model.lm)}
    if sync:
        results["acks"] = asyncio.run(_synced(engine, folder, results["weights"]))
    engine.export(out / "model")
    return results


async def _synced(engine: TrainEngine, folder: Path, want: dict[str, torch.Tensor]) -> list[tuple[bool, bool, bool]]:
    """For each way: whether wire and read-back are proven, and whether the sampler has the trainer's weights."""
    found = []
    for way in ("shared memory", "sockets"):
        lm = load_causal_lm(folder)
        if engine.lora is not None:
            add_adapters(lm, engine.lora, torch.float32, folder)
            init_adapters(lm)
        sampler = tiny_engine(lm, trusted=False)
        synced = SyncedRank(engine, sampler, way)
        await synced.reconcile()
        ack = await synced.sync(0)
        same = all(torch.equal(p, want[name]) for name, p in named_weights(sampler._weights.lm))
        found.append((ack.wire, ack.read_back, same))
        synced.close()
    return found


@pytest.mark.parametrize(
    ("model", "lora"), [*zip(MODELS.values(), [LORA, LoraConfig()], strict=True)], ids=MODELS.keys()
)
def test_state_moves_from_mesh_to_mesh_and_to_samplers(pool: Any, tmp_path: Path, model: dict[str, Any], lora: Any):
    tiny_lm(**model).save_pretrained(tmp_path / "source")
    args = (tmp_path / "source", tmp_path / "one", [ONE_RANK] * 3, lora, False)
    (want,) = pool.run(_steps, 1, *args)
    got = pool.run(_steps, 4, tmp_path / "source", tmp_path / "mesh", [TP, BOTH, mesh(dp_shard=4)], lora, True)
    assert [rank["acks"] for rank in got] == [[(True, True, True)] * 2] * 4
    for step, norm in enumerate(want["norms"]):
        assert [rank["norms"][step] for rank in got] == pytest.approx([norm] * 4, rel=1e-4)
    for name, tensor in want["weights"].items():
        torch.testing.assert_close(got[0]["weights"][name], tensor, atol=2e-5, rtol=1e-4, msg=name)
    exported = [dict(load_causal_lm(tmp_path / name / "model").named_parameters()) for name in ("one", "mesh")]
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name], tensor, atol=2e-5, rtol=1e-4, msg=name)


def _start_error(rank: int, world: int, folder: Path) -> str:
    missed = {f"shared_expert.{name}_proj": "" for name in ("gate", "up", "down")}
    with patch.dict(PLANS, {"qwen2_moe": missed}), pytest.raises(ConfigError) as error:
        _engine(folder, mesh(tp=2), LoraConfig(), world)
    return str(error.value)


def test_a_plan_that_misses_layers_is_named_with_them(pool: Any, tmp_path: Path):
    tiny_lm("qwen2_moe").save_pretrained(tmp_path)
    for error in pool.run(_start_error, 2, tmp_path):
        assert "meshrl's plan of tensor parallelism for this family is wrong (then train.mesh.tp=1 is right" in error
        assert "does not cut model.layers.*.mlp.gate, model.layers.*.mlp.shared_expert.down_proj" in error
