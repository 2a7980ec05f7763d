"""Weights and optimizer states that are not finite, in the shard of one rank: each step, save, load and export finds
them, and where ranks go on together, all of them raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import engine_over
from poisoned_states import poison
from test_checkpoint_reshard import UNEVEN, _refused, _step, save
from test_lora import with_adapters
from tiny_models import tiny_qwen2

from meshrl.core.errors import CheckpointError
from meshrl.model.lora import trained_weights
from meshrl.parallel.fsdp import local_shard
from meshrl.train.engine import TrainEngine


def _write_value(engine: TrainEngine, rank: int, world: int, value: float, slot: str | None = None) -> str:
    """Write the value into the last rank's shard of one tensor, and return its name."""
    name, p = list(trained_weights(engine.model.lm).items())[3]
    if rank == world - 1:
        target = p.detach() if slot is None else engine.optimizer.state[p][slot]
        local_shard(target).view(-1)[-1] = value
    return name


def _updated(rank: int, world: int, value: float, dtype: torch.dtype | None, lora: bool) -> dict[str, Any]:
    engine = engine_over(with_adapters() if lora else tiny_qwen2(), world, dtype=dtype)
    _step(engine, rank, world, 0)
    healthy = engine.optim_step(1e-3).not_finite
    named = []
    engine.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: named.append(_write_value(engine, rank, world, value))
    )
    return {"healthy": healthy, "found": engine.optim_step(1e-3).not_finite, "named": named[0]}


@pytest.mark.parametrize(
    ("value", "dtype", "lora", "found"),
    [
        (float("nan"), None, False, True),
        (float("-inf"), None, True, True),
        (1e5, torch.float16, False, True),
        (1e5, torch.bfloat16, False, False),
    ],
    ids=["nan", "infinity in an adapter", "above the range of float16", "within the range of bfloat16"],
)
def test_the_rank_that_holds_a_weight_that_is_not_finite_reports_it_after_the_update(pool, value, dtype, lora, found):
    first, last = pool.run(_updated, 2, value, dtype, lora)
    assert first["healthy"] == first["found"] == last["healthy"] == ""
    assert last["found"] == (last["named"] if found else "")


def _saved(rank: int, world: int, folder: Path, slot: str | None) -> tuple[str, str]:
    engine = engine_over(tiny_qwen2(), world)
    _step(engine, rank, world, 0)
    name = _write_value(engine, rank, world, float("inf"), slot)
    engine.save(folder)
    try:
        engine.finish_save()
    except CheckpointError as error:
        return name, str(error)
    return name, ""


@pytest.mark.parametrize("slot", [None, "exp_avg_sq"])
def test_a_state_that_is_not_finite_is_not_written(pool, tmp_path, slot):
    (_, first), (name, last) = pool.run(_saved, 2, tmp_path, slot)
    kind = "model" if slot is None else f"optimizer.{slot}"
    assert first == "" and f"values that are not finite: {kind}.{name}. " in last
    assert [file.name for file in tmp_path.iterdir()] == ["policy_rank_00000.safetensors"]


def _trained(rank: int, world: int, final: Path) -> None:
    engine = engine_over(tiny_qwen2(**UNEVEN), world)
    _step(engine, rank, world, 0)
    save(engine, final)


@pytest.fixture(scope="module")
def state(pool, tmp_path_factory) -> Path:
    final = tmp_path_factory.mktemp("run") / "state"
    pool.run(_trained, 2, final)
    return final


@pytest.mark.parametrize("prefix", ["model.", "optimizer.exp_avg."])
@pytest.mark.parametrize("world", [1, 2])
def test_a_state_that_is_not_finite_is_refused_by_every_rank_before_anything_is_changed(
    pool, state, tmp_path, prefix, world
):
    """Also by the ranks that do not read the damaged part."""
    name = poison(state, tmp_path / "state", "policy_rank_00001.safetensors", prefix)
    for message, untouched in pool.run(_refused, world, tmp_path / "state", UNEVEN):
        assert untouched
        assert f"{tmp_path / 'state'} contains values that are not finite in {name}: " in message


def _exported(rank: int, world: int, value: float, dtype: torch.dtype, lora: bool, path: Path) -> tuple[str, str]:
    engine = engine_over(with_adapters() if lora else tiny_qwen2(), world, dtype=dtype)
    name = _write_value(engine, rank, world, value)
    try:
        engine.export(path)
    except CheckpointError as error:
        dist.barrier()  # the ranks are still at the same collective
        return name, str(error)
    return name, ""


@pytest.mark.parametrize(
    ("value", "dtype", "lora"),
    [
        (float("nan"), torch.bfloat16, False),
        (1e5, torch.float16, False),
        (float("nan"), torch.float32, True),
    ],
    ids=["nan", "above the range of float16", "nan in an adapter"],
)
def test_a_model_that_is_not_finite_in_its_dtype_is_not_written(pool, tmp_path, value, dtype, lora):
    for name, message in pool.run(_exported, 2, value, dtype, lora, tmp_path / "model"):
        weight = name.replace(".lora_B", "").replace(".lora_A", "")
        assert f"the model is not written: {weight} has values that are not finite in {str(dtype)[6:]} (" in message
    assert not (tmp_path / "model").exists()


def test_a_finite_model_within_the_range_is_written(pool, tmp_path):
    assert [text for _, text in pool.run(_exported, 2, 1e5, torch.bfloat16, False, tmp_path / "model")] == ["", ""]
