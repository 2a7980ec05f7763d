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
