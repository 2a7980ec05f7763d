"""The bytes that `--explain` computes from config.json, compared with those of real engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import ask, run
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh
from tiny_tokenizers import tiny_tokenizer

from meshrl.algo.losses import sft_loss
from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, REFERENCE
from meshrl.model.costs import model_memory
from meshrl.parallel.mesh import build_mesh
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.rollout.embedded.kv_cache import room_for
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

SIZES: dict[str, Any] = dict(
    vocab_size=301, hidden_size=40, intermediate_size=50
)  # ranks get different numbers of rows


def _held(rank: int, world: int, model: ModelConfig, train: TrainConfig) -> dict[str, int]:
    mesh = build_mesh(train.mesh_shape(world), "cpu")
    policy, reference = (TrainEngine.build(model, train, mesh, role) for role in (POLICY, REFERENCE))
    batches = [pack([sample], [i]) for i, sample in enumerate(weigh(random_samples(0, [5, 9])))]
    policy.forward_backward(batches, sft_loss)
    gradients = policy.memory()["grads"]
    policy.optim_step(1e-3)
    assert policy.optimizer is not None
    counts = 4 * len(policy.optimizer.state)  # AdamW's number of steps, for each parameter
    after = policy.memory()
    moments = after["optimizer"] - counts
    return {
        "masters": after["params"],
        "gradients": gradients,
        "moments": moments,
        "reference": reference.memory()["params"],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model, and in `config` its config.json alone."""
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen2(tie=False, **SIZES).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config").mkdir()
    shutil.copy(folder / "config.json", folder / "config")
    return folder


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_bytes_of_train_engines_follow_from_config_json(pool, folder: Path, strategy: Any, lora: bool):
    """fp32 masters, bf16 compute. The first rank has the largest shards."""
    config = ModelConfig(path=str(folder), dtype="bfloat16", lora=LoraConfig(enabled=lora, rank=3))
    train = TrainConfig(sharding_strategy=strategy)
    held = pool.run(_held, 2, config, train)[0]
    computed = model_memory(config.model_copy(update={"path": str(folder / "config")}), train, 2)
    if lora:
        assert computed.reference == 0  # the policy without its adapters
        held["reference"] = 0
    assert {name: getattr(computed, name) for name in held} == held


def test_the_bytes_of_a_sampler_follow_from_config_json(folder: Path):
    config = ModelConfig(path=str(folder), dtype="float32")
    engine = build_embedded_engine(config, RolloutConfig(), torch.device("cpu"), "tiny", ())
    engine.trust_loaded_weights()
    computed = model_memory(config, TrainConfig(), 1)
    assert computed.weights == sum(p.nbytes for p in engine._runner.model.parameters())
    run(engine, [ask(str(i), [i] * 7, max_new_tokens=140, temperature=0.0) for i in range(9)])
    rows, positions = room_for(9, 147)
    assert (rows, positions) == (10, 256)
    assert computed.token is not None
    assert engine._runner.running.num_bytes == rows * positions * computed.token
