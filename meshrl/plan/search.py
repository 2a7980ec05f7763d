"""The meshes and modes of activation checkpointing that fit into a device, by the predicted time of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import product

from meshrl.core.errors import ConfigError
from meshrl.plan.changes import MOST, Change, Keys, fit
from meshrl.plan.decisions import recomputed_every
from meshrl.plan.memory import PlannedRun, RankMemory, traffic

RECOMPUTED = {False: 1.0, "selective": 1.01, "submodule": 1.2, True: 4 / 3}  # mode -> FLOPs over those without it
FLOPS = 4e14  # a second, that a GPU computes
NODE = 8  # GPUs of a machine
SENDS = 3e11, 5e10  # bytes a second, that a GPU sends within a machine and to others
MODEL = (
    "predicted seconds of an optimizer step: FLOPs, with those that are computed twice, at "
    f"{FLOPS / 1e12:.0f} TFLOP/s, or FSDP2's bytes if these take longer, and then those of ulysses and tp, at "
    f"{SENDS[0] / 1e9:.0f} GB/s in a machine of {NODE} GPUs and {SENDS[1] / 1e9:.0f} GB/s between machines; without "
    "sampling and weight sync"
)


def fastest(
    job: PlannedRun, device_bytes: int, planned: Callable[[Keys], tuple[PlannedRun, Sequence[RankMemory]]]
) -> list[Change]:
    """At most MOST that fit, each planned, by the keys of which the config has other values. planned: raises
    ConfigError for what the config's check refuses."""
    found = list[tuple[float, Change]]()
    for keys in _meshes(job):
        with suppress(ConfigError):
            changed, ranks = planned(keys)
            if fit(ranks, device_bytes) and changed.memory.activations is not None:
                seconds, need = step_s(changed), max(rank.total(rank.peak) for rank in ranks)
                found.append((seconds, Change(keys, f"{seconds:.1f} s", need, True)))
    return [change for _, change in sorted(found, key=lambda each: each[0])[:MOST]]


def step_s(job: PlannedRun) -> float:
    """Seconds of an optimizer step, without FLOPs if those of the model are unknown."""
    config, ranks = job.config, job.num_train_ranks
    _, shards, ulysses, tp = config.train.mesh_shape(ranks)
    tokens = config.rows_per_update * (config.longest_row_tokens or job.tokens) / ranks
    computes = tokens * (job.memory.flops or 0) / FLOPS * _flops_share(config.train.activation_checkpointing)
    sent, peers = traffic(job), {"tp": tp, "ulysses": ulysses * tp, "FSDP2": shards * ulysses * tp, "replicas": ranks}
    seconds = {axis: size / SENDS[peers[axis] > NODE] for axis, size in sent.items()}
    of_weights = seconds.pop("FSDP2", 0.0) + seconds.pop("replicas", 0.0)
    return max(computes, of_weights) + sum(seconds.values())


def _flops_share(mode: bool | str) -> float:
    """FLOPs over those without recomputation."""
    return RECOMPUTED.get(mode, 1 + 1 / 3 / (recomputed_every(mode) or 1))


def _meshes(job: PlannedRun) -> Iterator[Keys]:
    ranks, train, sizes = job.num_train_ranks, job.config.train, (1, 2, 4, 8)
    for replicas, ulysses, tp, mode in product(sorted({1, max(1, ranks // NODE)}), sizes, sizes, RECOMPUTED):
        if ulysses * tp <= NODE and ranks % (replicas * ulysses * tp) == 0:
            keys = {
                "train.sharding_strategy": "HYBRID_SHARD" if replicas > 1 else "FULL_SHARD",
                "train.mesh.dp_replicate": replicas,
                "train.mesh.dp_shard": ranks // (replicas * ulysses * tp),
                "train.mesh.ulysses": ulysses,
                train.tp_key: tp,
                "train.activation_checkpointing": mode,
            }
            yield {key: value for key, value in keys.items() if reduce(getattr, key.split("."), job.config) != value}
