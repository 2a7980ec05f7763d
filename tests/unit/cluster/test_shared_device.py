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


class Parts:
    """An engine of which parts are on the device."""

    def __init__(self, *parts: str):
        self.parts = set(parts)

    def release(self, parts: set[str]) -> None:
        self.parts -= parts

    def restore(self, parts: set[str]) -> None:
        self.parts |= parts


class ServedParts(Parts):
    async def restore(self, parts: set[str]) -> None:  # type: ignore[override]
        super().restore(parts)


def test_parameters_leave_the_device_while_a_sampler_works_and_are_there_when_weights_are_sent(
    monkeypatch: pytest.MonkeyPatch,
):
    """The second sync follows an evaluation, without a training phase in between."""
    monkeypatch.setattr(rank_sync, "has_own_memory", lambda device: True)
    monkeypatch.setattr(rank_sync, "empty_cache", lambda device: None)
    policy, reference = Parts("params"), Parts("params")
    sampler: Any = ServedParts()
    engines: Any = {"policy": policy, "reference": reference}
    spec = worker_spec(train=TrainConfig(param_offload=True), rollout=RolloutConfig(engine="vllm", release_memory=True))
    device = SharedDevice(spec, torch.device("cpu"), engines, sampler)
    assert device.is_shared
    for follows_training in (True, False):
        if follows_training:
            device.for_training()
        device.make_room("weights")
        assert policy.parts == reference.parts == {"params"} and sampler.parts == set()
        asyncio.run(device.restore_sampler("weights"))
        device.make_room("kv_cache")
        assert policy.parts == reference.parts == set()
        asyncio.run(device.restore_sampler("kv_cache"))
        with device.policy():  # such as an export while the sampler works
            assert policy.parts == {"params"} and reference.parts == set()
        assert policy.parts == set() and sampler.parts == {"weights", "kv_cache"}
        sampler.release({"weights", "kv_cache"})
    device.for_training()
    assert policy.parts == reference.parts == {"params"}
    with device.policy():
        assert policy.parts == {"params"}
