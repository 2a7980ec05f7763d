"""Changes of a config that lower the memory of its ranks, in the order of what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshrl.config.run import RunConfig
from meshrl.config.values import show
from meshrl.core.errors import ConfigError
from meshrl.plan.memory import CACHE, PlannedRun, RankMemory, fits

MOST = 5
Keys = Mapping[str, Any]  # values by key of the config


@dataclass(frozen=True, slots=True)
class Change:
    """need: bytes of the largest phase with it."""

    keys: Keys
    cost: str
    need: int
    fits: bool

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={show(value)}" for key, value in self.keys.items()]


def fit(ranks: Sequence[RankMemory], device_bytes: int) -> bool:
    return all(fits(rank, device_bytes) for rank in ranks)


def changes(
    job: PlannedRun, ranks: Sequence[RankMemory], device_bytes: int, planned: Callable[[Keys], Sequence[RankMemory]]
) -> list[Change]:
    """Each of them planned again: up to the first one that is enough by itself; if none is, also the fewest together
    that are, or all. planned: raises ConfigError for what the config's check refuses."""
    found, before = list[Change](), _peak(ranks)

    def tried(keys: Keys, cost: str) -> Change:
        after = planned(keys)
        return Change(keys, cost, _peak(after), fit(after, device_bytes))

    for keys, cost in _candidates(job, ranks):
        with suppress(ConfigError):
            change = tried(keys, cost)
            found += [change] if change.need < 0.99 * before else []
        if found and (found[-1].fits or len(found) == MOST - 1):
            break
    together, alone = dict[str, Any](), list(found)
    for change in alone:
        together |= change.keys
        if len(together) > len(change.keys) and not found[-1].fits:
            with suppress(ConfigError):
                both = tried(dict(together), "together")
                found += [both] if both.fits or change is alone[-1] else []
    return found


def _peak(ranks: Sequence[RankMemory]) -> int:
    return max(rank.total(rank.peak) for rank in ranks)


def _candidates(job: PlannedRun, ranks: Sequence[RankMemory]) -> Iterator[tuple[Keys, str]]:
    """Values of keys, and what they cost, the cheapest first."""
    config, train = job.config, job.config.train
    longest = config.longest_row_tokens or job.tokens
    if train.sharding_strategy != "FULL_SHARD":
        yield {"train.sharding_strategy": "FULL_SHARD"}, "parameters are gathered again for the backward pass"
    half = max(longest, (train.max_tokens_per_microbatch or 2 * longest) // 2)
    if half < job.tokens:
        yield {"train.max_tokens_per_microbatch": half}, "smaller products"
    if isinstance(config, RunConfig) and config.rollout.engine == "embedded" and not job.on_cpu:
        if cache := max(rank.device.get(CACHE, {}).get("rollout", 0) for rank in ranks):
            yield {"rollout.embedded.kv_cache_bytes": cache // 2}, "rows wait when it is full"
        size = next((n for n in (1, 2, 4, 8) if job.memory.weights / n < 0.4 * (job.device_bytes or 0)), 16)
        if size > 1:
            keys = {"rollout.engine": "vllm", "rollout.tensor_model_parallel_size": size}
            yield keys, f"a server on {size} GPUs in place of a copy in each"
    if not train.activation_checkpointing:
        yield {"train.activation_checkpointing": True}, "the forward pass is computed twice"
    if not job.on_cpu and not train.optimizer_offload:
        yield {"train.optimizer_offload": True}, "moments are copied from and to the host in each optimizer step"
    if train.optimizer.kind == "adamw" and train.mesh_shape(job.num_train_ranks)[3] == 1:
        yield {"train.optimizer.kind": "adamw_8bit"}, "moments are rounded to 8 bits"
    colocated = isinstance(config, RunConfig) and not config.cluster.num_rollout_ranks
    if colocated and not job.on_cpu and not train.param_offload:
        yield {"train.param_offload": True}, "masters are copied from and to the host in each step"
    for axis, size in (("ulysses", train.mesh.ulysses), ("tp", train.mesh.tp)):
        if job.num_train_ranks % (2 * size) == 0:
            yield {f"train.mesh.{axis}": 2 * size}, "ranks exchange tokens in each layer"
    if not config.model.lora.enabled:
        yield {"model.lora.enabled": True}, "trains adapters alone"
