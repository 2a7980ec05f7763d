"""A rank that starts a server has the server's time to load."""

from __future__ import annotations

import pytest

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.config.rollout import RolloutConfig, VllmConfig
from meshrl.plan.decisions import deadlines_of


@pytest.mark.parametrize(
    ("cluster", "rollout", "load_s"),
    [
        ({}, RolloutConfig(), 600.0),
        ({}, None, 600.0),
        ({}, RolloutConfig(engine="vllm"), 1860.0),
        ({"timeout_s": 3600.0}, RolloutConfig(engine="sglang"), 3600.0),
        ({"deadlines": Deadlines(load=30.0)}, RolloutConfig(engine="vllm"), 30.0),
        ({}, RolloutConfig(engine="vllm", vllm=VllmConfig(start_deadline_s=5000.0)), 5060.0),
    ],
)
def test_a_rank_may_load_for_as_long_as_its_server_may_start(cluster, rollout, load_s):
    """Otherwise the rank is lost before rollout.vllm.start_deadline_s has passed, and that key has no effect."""
    assert deadlines_of(ClusterConfig(**cluster), rollout)["load"] == load_s
