"""Whose memory is on a device that a trainer and a sampler share, in each part of a step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tiny_specs import worker_spec

from meshrl.cluster import rank_sync
from meshrl.cluster.rank_sync import SharedDevice
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig


class Trainer:
    """on_device: whether its parameters are."""

    on_device = True

    def release(self, frozen: bool = True) -> None:
        self.on_device = False

    def restore(self) -> None:
        self.on_device = True


class Sampler:
    """parts: those on the device."""

    def __init__(self) -> None:
        self.parts: set[str] = set()

    async def restore(self, parts: set[str]) -> None:
        self.parts |= parts


def test_parameters_leave_the_device_while_a_sampler_works_and_are_there_when_weights_are_sent(
    monkeypatch: pytest.MonkeyPatch,
):
    """The second sync follows an evaluation, without a training phase in between."""
    monkeypatch.setattr(rank_sync, "has_own_memory", lambda device: True)
    monkeypatch.setattr(rank_sync, "empty_cache", lambda device: None)
    policy, reference = Trainer(), Trainer()
    sampler: Any = Sampler()
    engines: Any = {"policy": policy, "reference": reference}
    spec = worker_spec(train=TrainConfig(param_offload=True), rollout=RolloutConfig(engine="vllm", release_memory=True))
    device = SharedDevice(spec, torch.device("cpu"), engines, sampler)
    assert device.is_shared
    for follows_training in (True, False):
        if follows_training:
            device.for_training()
        device.make_room("weights")
        assert policy.on_device and reference.on_device and sampler.parts == set()
        asyncio.run(device.restore_sampler("weights"))
        device.make_room("kv_cache")
        assert not policy.on_device and not reference.on_device
        asyncio.run(device.restore_sampler("kv_cache"))
        with device.policy():  # such as an export while the sampler works
            assert policy.on_device and not reference.on_device
        assert not policy.on_device and sampler.parts == {"weights", "kv_cache"}
        sampler.parts.clear()
    device.for_training()
    assert policy.on_device and reference.on_device
    with device.policy():
        assert policy.on_device
