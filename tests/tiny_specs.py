"""Worker specs with defaults, for tests that set only some fields."""

from __future__ import annotations

from typing import Any

from meshrl.cluster.executor import WorkerSpec
from meshrl.config.model import ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY


def worker_spec(**changes: Any) -> WorkerSpec:
    """The spec of the only rank of a run, which trains and does not sample."""
    facts: dict[str, Any] = dict(
        rank=0,
        num_train_ranks=1,
        num_rollout_ranks=0,
        model=ModelConfig(path="unused"),
        train=TrainConfig(),
        rollout=None,
        roles=(POLICY,),
        stop_token_ids=(),
        timeout_s=60.0,
    )
    return WorkerSpec(**{**facts, **changes})
