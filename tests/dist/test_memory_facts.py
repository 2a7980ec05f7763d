"""The bytes that `--explain` computes from config.json, compared with those of real engines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import ask, run
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh
from tiny_tokenizers import tiny_tokenizer
from torch.autograd.graph import saved_tensors_hooks

from meshrl.algo.losses import sft_loss
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.run import SftRunConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, REFERENCE
from meshrl.model.costs import model_memory, run_memory
from meshrl.parallel.mesh import build_mesh
from meshrl.plan.memory import rank_memory
from meshrl.plan.sizes import PAGE_TOKENS, room_for
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.train.engine import TrainEngine

TOKENS = 2 * 53
ALIGNED = 112  # its multiples are sizes of scores in bf16 on a CPU
SIZES: dict[str, Any] = dict(
    vocab_size=301, hidden_size=40, intermediate_size=50
)  # ranks get different numbers of rows


def _held(rank: int, world: int, model: ModelConfig, train: TrainConfig) -> dict[str, int]:
    mesh = build_mesh(train.mesh_shape(world), "cpu")
    policy, reference = (TrainEngine.build(model, train, mesh, role) for role in (POLICY, REFERENCE))
    samples, stored = weigh(random_samples(0, [TOKENS] * policy.coordinates.num_ulysses)), dict[int, int]()
    batches, tokens = [policy.pack(samples, range(len(samples)))], TOKENS // policy.coordinates.num_tp

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.numel() and not (x.numel() % tokens and x.numel() % ALIGNED):  # not a parameter
            stored[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def loss(*args: Any) -> Any:
        activations.append(sum(stored.values()))
        return sft_loss(*args)

    activations = list[int]()
    with saved_tensors_hooks(keep, lambda x: x):
        policy.forward_backward(batches, loss)
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
        "activations": activations[0],
        "state": policy.state_bytes(),
        "model": policy.model_bytes(),
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


def _planned(
    folder: Path, model: dict[str, Any], train: dict[str, Any], num_ranks: int
) -> tuple[SftRunConfig, dict[str, int]]:
    """A config, and the bytes of its run by config.json alone."""
    sft = {"path": "rows.jsonl", "num_steps": 1, "rows_per_step": num_ranks, "max_row_tokens": TOKENS}
    cluster, train = {"num_train_ranks": num_ranks}, {"max_tokens_per_microbatch": TOKENS} | train
    content = {"model": {"path": str(folder)} | model, "train": train, "cluster": cluster, "sft": sft}
    config = SftRunConfig.model_validate(content)
    path = str(folder / "config")
    known = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    job, _ = run_memory(known, "cpu")
    (rank,) = rank_memory(replace(job, has_reference=True))
    parts = {part: sizes["optimizer" if part == "gradients" else "train"] for part, sizes in rank.device.items()}
    parts.setdefault("reference", 0)
    return config, parts | {"state": 3 * job.memory.trained, "model": job.memory.weights}


STORES = {"activation_checkpointing": False}
TRAIN = {"sharded": {}, "replicated": {"sharding_strategy": "NO_SHARD"} | STORES, "tp": {"mesh": {"tp": 2}} | STORES}
TRAIN["every_2"] = {"activation_checkpointing": "every_2"}
TRAIN["submodule"] = {"activation_checkpointing": "submodule"}


TRAIN["four"] = {}
TRAIN["hybrid"] = {"sharding_strategy": "HYBRID_SHARD", "mesh": {"dp_replicate": 2}}
TRAIN["ulysses"] = {"mesh": {"ulysses": 2}} | STORES
RANKS = {"four": 4, "hybrid": 4}


@pytest.mark.parametrize("layout", TRAIN)
@pytest.mark.parametrize("lora", [False, True])
def test_the_bytes_of_train_engines_follow_from_config_json(pool, folder: Path, layout: str, lora: bool):
    """fp32 masters, bf16 compute. The first rank has the largest shards."""
    train, num_ranks = TRAIN[layout], RANKS.get(layout, 2)
    config, computed = _planned(folder, {"dtype": "bfloat16", "lora": {"enabled": lora, "rank": 3}}, train, num_ranks)
    of_ranks = pool.run(_held, num_ranks, config.model, config.train)
    held = of_ranks[0] | {"state": sum(rank["state"] for rank in of_ranks)}
    if lora:
        assert computed["reference"] == 0  # the policy without its adapters
        held |= {"reference": 0, "model": computed["model"]}
    activations = held.pop("activations")
    assert {name: computed[name] for name in held} == held
    least = 0.8 if lora else 0.97  # before its first adapter, the first block of two stores nothing
    assert least < activations / computed["activations"] < 1.05


def test_the_bytes_of_a_sampler_follow_from_config_json(folder: Path):
    config = ModelConfig(path=str(folder), dtype="float32")
    engine = build_embedded_engine(config, RolloutConfig(), torch.device("cpu"), "tiny", ())
    engine.trust_loaded_weights()
    computed = model_memory(config, TrainConfig(), 1)
    assert computed.weights == sum(p.nbytes for p in engine._runner.model.parameters())
    run(engine, [ask(str(i), [i] * 7, max_new_tokens=140, temperature=0.0) for i in range(9)])
    assert computed.token is not None
    assert engine._runner.pool.num_bytes == room_for(9, 146, PAGE_TOKENS["cpu"]) * computed.token
