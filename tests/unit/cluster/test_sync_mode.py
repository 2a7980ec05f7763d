"""Which syncs send only changes, and how much a sync sends at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from tiny_specs import worker_spec

from meshrl.cluster.actors import RankBoxes
from meshrl.cluster.launch import this_machine
from meshrl.cluster.rank_sync import RankSync
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.cluster import ClusterConfig
from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.plan.decisions import fastest_sync
from meshrl.sync.collectives import Broadcast
from meshrl.sync.layout import Box, make_layout
from meshrl.sync.sockets import Sockets


@pytest.mark.parametrize(
    ("nodes", "transport", "lora", "mode"),
    [
        (1, "auto", False, "full"),
        (2, "auto", False, "delta"),
        (1, "broadcast", False, "delta"),
        (1, "auto", True, "delta"),
    ],
)
def test_changes_are_not_searched_where_all_weights_go_through_shared_memory(nodes, transport, lora, mode):
    model = ModelConfig(path="model", lora=LoraConfig(enabled=lora))
    rollout = RolloutConfig(sync_mode="delta", sync_transport=transport)
    assert fastest_sync(rollout, model, nodes, is_launched=False) == mode


def test_adapters_of_experts_are_not_sent_alone():
    model = ModelConfig(path="model", lora=LoraConfig(enabled=True, targets=["all-linear", "experts"]))
    assert fastest_sync(RolloutConfig(sync_mode="delta"), model, 1, is_launched=False) == "full"


def test_under_torchrun_changes_are_sent_because_the_ranks_may_be_on_several_machines(monkeypatch):
    """Torchrun's machines are not in cluster.nodes, which is 1."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "host0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    rollout, machine = RolloutConfig(sync_mode="delta"), this_machine(ClusterConfig())
    assert fastest_sync(rollout, ModelConfig(path="model"), 1, machine.is_launched) == "delta"


@pytest.mark.parametrize(
    ("device", "changes", "transport"),
    [
        ("cuda", {}, Broadcast),
        ("cuda", {"engine": "vllm"}, Broadcast),
        ("cpu", {}, Sockets),
        ("cpu", {"sync_transport": "broadcast"}, Broadcast),
        ("xpu", {}, Sockets),  # its collectives have no group besides the default one
        ("cuda", {"engine": "endpoint", "endpoint": {"url": "http://server:8000"}}, Sockets),  # reads files
        ("cuda", {"engine": "sglang", "sglang": {"url": "http://server:8000"}}, Sockets),
    ],
)
@pytest.mark.parametrize("sender", [0, None], ids=["sender", "sampler"])
def test_weights_are_broadcast_between_devices_that_nccl_connects(device, changes, transport, sender):
    """By default, to samplers in ranks of their own; both sides of a sync choose alike."""
    rollout = RolloutConfig(**changes)
    spec = worker_spec(rank=0 if sender == 0 else 1, num_train_ranks=1, num_rollout_ranks=1, rollout=rollout)
    layout = make_layout({"w": ((4,), "float32")})
    chosen = RankSync(spec, torch.device(device, 0), layout, None, None)._new_transport(sender)
    try:
        assert type(chosen) is transport
    finally:
        chosen.close()


@pytest.mark.parametrize(
    ("digest", "given", "want"),
    [("xxh3", None, 64 << 20), ("sum64", None, 1 << 30), ("sum64", 4096, 4096)],
    ids=["host memory", "accelerator", "of the config"],
)
def test_a_window_is_larger_on_accelerators_where_each_call_costs_more(digest, given, want):
    tensors, boxes = {"w": ((4,), "float32")}, [Box("w", (0,), (4,))]
    own = RankBoxes(tensors=tensors, boxes=boxes, tied={}, digest=digest)

    async def call(rank: int, method: object) -> RankBoxes:
        return own

    group = TrainGroup(SimpleNamespace(specs=[worker_spec(rank=0, num_train_ranks=1)], call=call))
    assert want * 0.9 < asyncio.run(group.layout(given)).transfer_bytes < want


def test_one_replica_of_the_weights_is_sent():
    async def call(rank: int, method: object) -> RankBoxes:
        return RankBoxes(tensors={"w": ((4,), "float32")}, boxes=[Box("w", (0,), (4,))], tied={}, digest="xxh3")

    train = TrainConfig(sharding_strategy="NO_SHARD")
    specs = [worker_spec(rank=rank, num_train_ranks=2, train=train) for rank in range(2)]
    layout = asyncio.run(TrainGroup(SimpleNamespace(specs=specs, call=call)).layout())
    assert len(layout.senders) == 1
