"""The phases of a run: which one a command to a rank belongs to. Their deadlines are `cluster.deadlines` (P26)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshrl.monitor.spans import current_span


def phase_of(method: Callable[..., Any]) -> str:
    """The phase of a RankWorker method, called from where the controller now is; any other function's own name."""
    phase = PHASE_OF.get(method.__name__, method.__name__)
    return "eval" if phase == "rollout" and current_span() == "eval" else phase


PHASE_OF = {
    "came_up": "start",
    "start": "load",
    "load": "load",
    "layout": "load",
    "reconcile": "load",
    "trust_loaded_weights": "load",
    "generate": "rollout",
    "score": "rollout",
    "abort": "rollout",
    "stats": "rollout",
    "forward": "annotate",
    "forward_backward": "train",
    "optim_step": "optim",
    "lend": "sync",
    "sync_colocated": "sync",
    "shard_source": "sync",
    "shard_next": "sync",
    "begin": "sync",
    "receive": "sync",
    "commit": "sync",
    "cancel": "sync",
    "save": "checkpoint",
    "finish_save": "checkpoint",
    "state_bytes": "checkpoint",
    "export": "export",
    "memory": "report",
    "stop": "end",
}
"""By name, because a rank may know the method under another class (an actor's)."""
