"""Which syncs send only changes."""

from __future__ import annotations

import pytest

from meshrl.cluster.launch import with_fastest_sync
from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.rollout import RolloutConfig


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
    assert with_fastest_sync(rollout, model, nodes).sync_mode == mode


def test_under_torchrun_changes_are_sent_because_the_ranks_may_be_on_several_machines(monkeypatch):
    """Torchrun's machines are not in cluster.nodes, which is 1."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "host0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    rollout = RolloutConfig(sync_mode="delta")
    assert with_fastest_sync(rollout, ModelConfig(path="model"), 1).sync_mode == "delta"
