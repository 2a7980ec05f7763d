"""The spans of collectives: all bytes of each sharding strategy, the wait for a slow rank, and equal results."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import engine_over
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from meshrl.algo.losses import sft_loss
from meshrl.monitor.recorder import Span, recorder
from meshrl.parallel.fsdp import full_tensor
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

SLEEP_S = 0.4
MICRO_BATCHES = 2


def _sft_after_sleep(out: Any, batch: Any) -> Any:
    time.sleep(SLEEP_S)
    return sft_loss(out, batch)


def _step(engine: TrainEngine, rank: int, loss: Any) -> None:
    samples = weigh(random_samples(0, [12, 3, 40, 7, 7, 21, 2, 30]))
    batches = [pack([samples[2 * m + i] for i in range(2)], [0, 1]) for m in range(MICRO_BATCHES)]
    with recorder.span("train", "phase"):
        engine.forward_backward(batches, loss)
    with recorder.span("optim", "phase"):
        engine.optim_step(1e-2)


def _spans(rank: int, world: int, train: dict[str, Any], slow: bool) -> tuple[list[Span], list[Any], dict[str, int]]:
    """The spans of a step and its metrics, and the bytes of a block and of the rest, as they are gathered."""
    engine = engine_over(tiny_qwen2(), world, train)
    recorder.clear()
    _step(engine, rank, _sft_after_sleep if slow and rank == 1 else sft_loss)
    shards = engine.mesh["dp_shard"].size()
    sizes = {"blocks": 0, "root": 0}
    for name, p in engine.model.named_parameters():
        padded = math.ceil(p.shape[0] / shards) * shards * math.prod(p.shape[1:])
        sizes["blocks" if "layers." in name else "root"] += padded * p.element_size()
    return list(recorder.trace(rank).spans), recorder.step_metrics(blocking=True), sizes


def _total(spans: list[Span], name: str, phase: str = "train") -> int:
    return sum(s.args["bytes"] for s in spans if s.name == name and s.args["phase"] == phase)


@pytest.mark.parametrize(
    ("strategy", "world", "gathers", "reductions"),
    [("FULL_SHARD", 2, 2, 1), ("SHARD_GRAD_OP", 2, 1, 1), ("NO_SHARD", 2, 0, 0), ("HYBRID_SHARD", 4, 2, 1)],
)
def test_the_bytes_of_all_collectives_are_those_of_the_strategy(pool, strategy, world, gathers, reductions):
    """gathers: of a block's parameters in each micro-batch; those of the root group are gathered once. A replica of
    one rank gathers nothing. Replicas sum their shards of the gradients."""
    train = {"sharding_strategy": strategy, **({"mesh": {"dp_replicate": 2}} if strategy == "HYBRID_SHARD" else {})}
    for spans, metrics, sizes in pool.run(_spans, world, train, False):
        full = sizes["blocks"] + sizes["root"]
        root_gathers = min(gathers, 1)
        expected = MICRO_BATCHES * (gathers * sizes["blocks"] + root_gathers * sizes["root"])
        assert _total(spans, "all_gather") == expected
        assert _total(spans, "reduce_scatter") == MICRO_BATCHES * reductions * full
        replicated = {"NO_SHARD": full, "HYBRID_SHARD": full // 2}.get(strategy, 0)
        assert _total(spans, "all_reduce") == MICRO_BATCHES * replicated
        has_shards = strategy != "NO_SHARD"
        assert (_total(spans, "all_reduce", "optim") > 0) == has_shards  # the norm of the gradient
        assert {s.args["group"] for s in spans if s.category == "collective"} == {2}
        assert all(s.end_ns > s.start_ns for s in spans)
        assert {m.name for m in metrics} == {"perf/compute_comm_ratio", "perf/exposed_comm_fraction"}


def test_one_rank_has_no_communication(pool):
    ((spans, metrics, _),) = pool.run(_spans, 1, {}, False)
    assert metrics == [] and {s.category for s in spans} == {"phase", "compute"}
    compute = [s.name for s in spans if s.category == "compute"]
    assert compute == ["forward", "backward"] * MICRO_BATCHES + ["clip", "optimizer"]


def test_the_others_wait_for_a_slow_rank_in_their_collectives(pool):
    (waiting, metrics, _), (slow, *_) = pool.run(_spans, 2, {}, True)
    waits = [s for s in waiting if s.category == "collective" and s.end_ns - s.start_ns > 0.9e9 * SLEEP_S]
    assert len(waits) == MICRO_BATCHES  # one for each sleep
    forwards = [s for s in slow if s.name == "forward"]
    assert all(s.end_ns - s.start_ns >= 1e9 * SLEEP_S for s in forwards) and len(forwards) == MICRO_BATCHES
    exposed = next(m for m in metrics if m.name == "perf/exposed_comm_fraction")
    assert exposed.sum >= sum(s.end_ns - s.start_ns for s in waits)
    train_ns = sum(s.end_ns - s.start_ns for s in waiting if s.category == "phase")
    assert exposed.weight == train_ns > exposed.sum


def _trained(rank: int, world: int, train: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters after two steps: with FSDP2's own collectives, and recorded, with the profiler."""
    results = []
    for recorded in (False, True):
        engine = engine_over(tiny_qwen2(), world, train)
        for module in engine.model.modules():
            if isinstance(module, FSDPModule) and not recorded:
                module.set_custom_all_gather(DefaultAllGather())
                module.set_custom_reduce_scatter(DefaultReduceScatter())
        profiler = torch.profiler.profile() if recorded else None
        if profiler is not None:
            recorder.annotate = torch.profiler.record_function
            profiler.start()
        for _ in range(2):
            _step(engine, rank, sft_loss)
        if profiler is not None:
            profiler.stop()
            recorder.annotate = nullcontext
        results.append([full_tensor(p).detach().clone() for p in engine.model.parameters()])
    return results[0], results[1]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_recording_and_profiling_do_not_change_a_bit(pool, strategy):
    for plain, recorded in pool.run(_trained, 2, {"sharding_strategy": strategy}):
        assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
