"""What a micro-batch of training calls on an accelerator, without one: on meta tensors, without FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from meta_device import META, DeviceCalls
from tiny_models import tiny_qwen2
from tiny_samples import random_groups

from meshrl.algo.losses import make_policy_loss, sft_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, Sample
from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.model.recipe import Recipe, cast_parameters
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack


@contextmanager
def _untimed(*args: Any, **facts: Any) -> Iterator[None]:
    """Meta tensors have no streams and no events."""
    yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> TrainEngine:
    """param: number of layers."""
    monkeypatch.setattr(attention, "has_varlen_kernels", lambda device: True)
    monkeypatch.setitem(TrainEngine.forward_backward.__globals__, "timed", _untimed)
    lm = cast_parameters(tiny_qwen2(hidden_size=64, num_hidden_layers=request.param), torch.bfloat16).to(META)
    mesh: Any = SimpleNamespace(shape=(1, 1, 1, 1), get_rank=lambda: 0)
    recipe = Recipe(trains=True, device=META, compute_dtype=torch.bfloat16)
    return TrainEngine(CausalModel(lm.eval()), mesh, TrainConfig(), POLICY, recipe)


def _samples() -> list[Sample]:
    samples = random_groups(0, [7, 4], [5, 9])
    for s in samples:
        s.loss_weight = np.asarray(s.loss_weight, np.float32)
    return samples


def _step(engine: TrainEngine, loss: Any, num_batches: int) -> DeviceCalls:
    samples = _samples()
    with DeviceCalls() as calls:
        batches = [pack(samples, range(len(samples)), META) for _ in range(num_batches)]
        engine.forward_backward(batches, loss)
    return calls


@pytest.mark.parametrize(("engine", "launches"), [(1, 323), (3, 583)], indirect=["engine"])
def test_a_micro_batch_stays_within_its_budget(engine: TrainEngine, launches: int) -> None:
    """Three reads: the sums of the loss, those of the correction, and the logprobs that verify the sampler's. Two
    copies to the device: the batch, and the layout of its rows. Sizes that depend on values are known on the host,
    which otherwise waits for them."""
    calls = _step(engine, make_policy_loss(AlgoConfig()), 1)
    assert (calls.num_reads, calls.num_uploads) == (3, 2)
    assert calls.num_launches <= launches


@pytest.mark.parametrize("engine", [1], indirect=True)
def test_each_micro_batch_adds_the_same(engine: TrainEngine) -> None:
    calls = _step(engine, make_policy_loss(AlgoConfig()), 3)
    assert (calls.num_reads, calls.num_uploads) == (9, 6)
    calls = _step(engine, sft_loss, 1)
    assert (calls.num_reads, calls.num_uploads) == (2, 2)


@pytest.mark.parametrize("engine", [1], indirect=True)
def test_nothing_is_read_before_the_end_of_an_update(engine: TrainEngine) -> None:
    """The device computes the micro-batches without a wait in between: losses, correction, logprobs and entropies are
    read after the last one. So are the logprobs of forward passes."""
    calls, at_end_of_micro_batch = DeviceCalls(), list[int]()
    engine.on_batch = lambda: at_end_of_micro_batch.append(calls.num_reads)
    samples = _samples()
    with calls:
        batches = [pack(samples, range(len(samples)), META) for _ in range(3)]
        result = engine.forward_backward(batches, make_policy_loss(AlgoConfig()), entropies=True, num_scored=1)
        assert (at_end_of_micro_batch, calls.num_reads) == ([0, 0, 0], 12)
        logprobs = engine.forward(batches)
    assert (at_end_of_micro_batch[3:], calls.num_reads) == ([12, 12, 12], 15)
    assert result.logprobs.keys() == result.entropies.keys() == logprobs.keys() == set(range(len(samples)))


@pytest.mark.parametrize("engine", [1], indirect=True)
def test_full_determinism_lasts_as_long_as_the_gradient(engine: TrainEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward, not in what the process computes next to it; cuDNN's attention has no such kernels."""
    monkeypatch.setattr(attention, "has_long_row_kernels", lambda device: True)
    policy, seen = make_policy_loss(AlgoConfig()), []

    def observe(at: str) -> None:
        seen.append(
            (at, torch.are_deterministic_algorithms_enabled(), attention.PackedAttention([0, 8], META).use_cudnn)
        )

    def loss(out: Any, batch: Any) -> Any:
        observe("forward")
        out.logprobs.register_hook(lambda grad: observe("backward"))
        return policy(out, batch)

    for wanted in (False, True):
        engine.cfg = TrainConfig(full_determinism=wanted)
        _step(engine, loss, 1)
        observe("after")
    usual = [(at, False, True) for at in ("forward", "backward", "after")]
    assert seen == [*usual, ("forward", True, False), ("backward", True, False), ("after", False, True)]
