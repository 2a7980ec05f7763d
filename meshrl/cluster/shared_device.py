"""The memory of a rank's device, which its train engines and a colocated sampler use in turns:

    for_training -> train -> make_room(weights) -> restore_sampler(weights) -> send the weights
    -> make_room(kv_cache) -> restore_sampler(kv_cache) -> sample -> for_training

The controller calls make_room in all ranks before any of them goes on, because a sampler may be another process on the
devices of several ranks. Parameters that are offloaded (train.param_offload) are on the host from make_room(kv_cache)
until make_room(weights) or for_training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from meshrl.cluster.executor import WorkerSpec
from meshrl.core.device import empty_cache, has_own_memory, return_freed_memory
from meshrl.core.types import POLICY
from meshrl.rollout.base import RolloutEngine
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.train.engine import TrainEngine


class SharedDevice:
    """engines: by role; none in a rank that only samples. sampler: that of this rank, if it has one."""

    def __init__(
        self,
        spec: WorkerSpec,
        device: torch.device,
        engines: Mapping[str, TrainEngine],
        sampler: RolloutEngine | None,
    ):
        self._device, self._engines, self._sampler = device, engines, sampler
        colocated = spec.trains and spec.rollout is not None and spec.num_rollout_ranks == 0
        self._releases_sampler = colocated and spec.rollout is not None and bool(spec.rollout.release_memory)
        self._offloads = colocated and spec.train.param_offload and has_own_memory(device)
        self._on_host = False
        self.is_shared = self._releases_sampler or self._offloads

    def for_training(self) -> None:
        """Free the caches of a sampler without requests, because the next sync drops them anyway, and restore the
        parameters."""
        if isinstance(self._sampler, EmbeddedEngine) and not self._sampler.has_work:
            self._sampler.drop_caches()
        return_freed_memory(self._device)
        self._restore()

    def make_room(self, part: str) -> None:
        """Make room for this part of a sampler. While it gets its weights, the train engines have their parameters;
        from its kv_cache on, only what they need while it works."""
        if part == "weights":
            self._restore()
        elif self._offloads:
            self._on_host = True  # also if only a part of them is
            for engine in self._engines.values():
                engine.release({"params"})
        if self.is_shared:
            empty_cache(self._device)

    async def restore_sampler(self, part: str) -> None:
        """Restore this part of a sampler that has released its memory."""
        if self._releases_sampler and self._sampler is not None:
            await self._sampler.restore({part})

    @contextmanager
    def policy(self) -> Iterator[None]:
        """The policy's parameters are on the device during this block."""
        engine = self._engines[POLICY.name]
        engine.restore({"params"})
        try:
            yield
        finally:
            if self._on_host:
                engine.release({"params"})

    def _restore(self) -> None:
        if self._on_host:
            for engine in self._engines.values():
                engine.restore({"params"})
            self._on_host = False
