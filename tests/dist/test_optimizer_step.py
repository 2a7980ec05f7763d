"""Clipping, skipped steps and memory on several ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from harness import engine_over, norm_of, unsharded
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrl.algo.losses import sft_loss
from meshrl.parallel.fsdp import full_tensor, local_shard
from meshrl.train.batch_plan import make_batch_plan
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

LENGTHS = [12, 3, 40, 7, 7, 21, 2, 30]


def _backward(engine: TrainEngine, rank: int, world: int, samples: list[Any]) -> None:
    plan = make_batch_plan([len(s) for s in samples], world, 40)
    batches = [pack([samples[i] for i in micro], micro) for micro in plan.micro_batches[rank]]
    engine.forward_backward(batches, sft_loss)


def _full_parameters(engine: TrainEngine) -> list[torch.Tensor]:
    return [full_tensor(p).clone() for p in engine.model.parameters()]


def _clipped(rank: int, world: int, clip: float) -> tuple[float, float]:
    engine = engine_over(tiny_qwen2(torch.float64), world, {"optimizer": {"clip": clip}})
    engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1.0)  # its step IS the clipped gradient
    before = _full_parameters(engine)
    _backward(engine, rank, world, weigh(random_samples(0, LENGTHS)))
    norm = engine.optim_step(1.0).grad_norm
    moved = math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(before, _full_parameters(engine), strict=True)))
    return norm, moved


@pytest.mark.parametrize("world", [1, 2, 4])
def test_norm_and_clipping_equal_those_of_the_unsharded_gradient(pool, world):
    """Every rank returns the norm before clipping; the applied gradient has the clip norm, or a smaller norm."""
    want = norm_of(unsharded(tiny_qwen2(torch.float64), weigh(random_samples(0, LENGTHS)), sft_loss)["grads"])
    for clip, applied in ((want / 3, want / 3), (want * 3, want), (0.0, want)):
        for norm, moved in pool.run(_clipped, world, clip):
            assert norm == pytest.approx(want, rel=1e-9)
            assert moved == pytest.approx(applied, rel=1e-5)


class _OfDTensors(TorchDispatchMode):
    """The names of operators that were called with a DTensor, or with a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, DTensor) for value in tree_leaves((args, kwargs))):
            self.names.append(str(func))
        return func(*args, **kwargs or {})


def _operators_of_a_step(rank: int, world: int, mesh: dict[str, int]) -> list[str]:
    engine = engine_over(tiny_qwen2(), world, {"mesh": mesh, "optimizer": {"clip": 1e-3}})
    at, samples = engine.coordinates, weigh(random_samples(0, LENGTHS))
    for _ in range(2):  # the first step makes the moments
        _backward(engine, at.data_index, at.num_data, samples)
        with _OfDTensors() as seen:
            engine.optim_step(1e-3)
    return seen.names


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=["shard", "tp"])
def test_a_step_computes_with_shards_and_not_with_dtensors(pool, mesh):
    """PyTorch plans the placements of a list of DTensors for seconds, at the first step of each run."""
    assert pool.run(_operators_of_a_step, 2, mesh) == [[]] * 2


def _poisoned(rank: int, world: int, where: str, train: dict[str, Any]) -> dict[str, Any]:
    engine = engine_over(tiny_qwen2(), world, train)
    samples = weigh(random_samples(0, LENGTHS))
    _backward(engine, rank, world, samples)
    first, counts = engine.optim_step(1e-3), [engine.num_optimizer_steps]
    before = _full_parameters(engine)
    if where == "loss":  # an infinite weight in one row, so on one rank
        samples[2].loss_weight = np.where(samples[2].mask, np.inf, 0.0)
        _backward(engine, rank, world, samples)
    else:  # a damaged shard of one rank's gradient, after the reduction
        _backward(engine, rank, world, samples)
        if rank == world - 1:
            local_shard(next(iter(engine.model.parameters())).grad).view(-1)[0] = float(where)
    skipped = engine.optim_step(1e-3)
    counts.append(engine.num_optimizer_steps)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, _full_parameters(engine), strict=True))
    _backward(engine, rank, world, weigh(random_samples(0, LENGTHS)))
    after = engine.optim_step(1e-3)
    changed = any(not torch.equal(a, b) for a, b in zip(before, _full_parameters(engine), strict=True))
    counts.append(engine.num_optimizer_steps)
    finite = all(bool(torch.isfinite(p).all()) for p in _full_parameters(engine))
    return {
        "skipped": [r.skipped for r in (first, skipped, after)],
        "norm": skipped.grad_norm,
        "unchanged": unchanged,
        "recovered": changed and finite,
        "counts": counts,
    }


@pytest.mark.parametrize(
    ("world", "where", "train"),
    [
        (1, "inf", {}),
        (2, "inf", {}),
        (4, "nan", {}),
        (2, "loss", {}),
        (4, "loss", {"sharding_strategy": "HYBRID_SHARD", "mesh": {"dp_replicate": 2, "dp_shard": 2}}),
        (2, "loss", {"sharding_strategy": "NO_SHARD"}),
    ],
)
def test_a_norm_that_is_not_finite_skips_the_step_on_every_rank(pool, world, where, train):
    """No parameter and no moment changes, and the next step works."""
    for report in pool.run(_poisoned, world, where, train):
        assert report["skipped"] == [False, True, False]
        assert not math.isfinite(report["norm"])
        assert report["unchanged"] and report["recovered"]
        assert report["counts"] == [1, 1, 2]


def _memory(rank: int, world: int) -> list[dict[str, int]]:
    engine = engine_over(tiny_qwen2(), world)
    built = engine.memory()
    _backward(engine, rank, world, weigh(random_samples(0, LENGTHS)))
    backward = engine.memory()
    engine.optim_step(1e-3)
    return [built, backward, engine.memory()]


def test_memory_of_a_rank_shrinks_with_the_number_of_ranks(pool):
    """Parameters, gradients and moments are 1/W each; every dim of the tiny model divides by 4."""
    full_bytes = 4 * sum(p.numel() for p in tiny_qwen2().parameters())
    counters = 4 * len(list(tiny_qwen2().parameters()))  # AdamW's step of each parameter, a scalar
    buffers = sum(b.numel() * b.element_size() for b in tiny_qwen2().buffers())
    for world in (1, 2, 4):
        share = full_bytes // world
        for built, backward, stepped in pool.run(_memory, world):
            assert built == {"params": share, "grads": 0, "optimizer": 0, "buffers": buffers}
            assert backward == {**built, "grads": share}
            assert stepped == {**built, "optimizer": 2 * share + counters}
