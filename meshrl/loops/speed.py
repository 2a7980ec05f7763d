"""How well a step used its devices, and how long requests waited: metrics of all loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.config.cluster import ClusterConfig
from meshrl.core.types import Metric, Trajectory
from meshrl.monitor.metrics import histogram


def throughput(cluster: ClusterConfig, num_tokens: int, wall_s: float) -> Metric:
    """num_tokens: of the trained rows, with their prompts. wall_s: of the complete step."""
    num_devices = cluster.num_train_ranks + cluster.num_rollout_ranks
    return Metric(name="perf/throughput", sum=num_tokens, weight=wall_s * num_devices, unit="tokens/s/device")


def unknown_device(step: int, metrics: Sequence[Metric]) -> str | None:
    """A note, at the first step of a run, that there is no perf/mfu. step: number of finished steps."""
    names = {metric.name for metric in metrics}
    if step or "train/model_flops" not in names or "perf/mfu" in names:
        return None
    return (
        "perf/mfu is not reported: the peak FLOP/s of the train ranks' devices is not in the table of "
        "meshrl/model/flops.py. Divide train/model_flops by it and by the seconds of training"
    )


def request_times(trajectories: Sequence[Trajectory]) -> list[Metric]:
    """How long turns waited in their engine's queue, and until their first token; each is absent if it is not known."""
    times = [turn.times for trajectory in trajectories for turn in trajectory.turns]
    queue = np.array([t.queue_s for t in times])
    first_token = queue + np.array([t.prefill_s for t in times])
    metrics = []
    for name, longest, seconds in (
        ("rollout/queue_s", "rollout/queue_max_s", queue),
        ("rollout/first_token_s", "rollout/first_token_max_s", first_token),
    ):
        if seconds.any():
            metrics += [
                histogram(name, seconds, "s"),
                Metric(name=longest, sum=float(seconds.max()), reduce="max", unit="s"),
            ]
    return metrics
