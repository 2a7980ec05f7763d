"""The memory of a rank's device, which its train engines and a colocated sampler use in turns:

    for_training -> train -> for_sync -> send the weights -> for_sampling -> sample -> for_training

A sampler whose memory is released (rollout.release_memory) has its weights from for_sync on, and its caches from
for_sampling on. Parameters that are offloaded (train.param_offload) are on the host between for_sampling and for_sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from meshrl.cluster.executor import WorkerSpec
from meshrl.core.device import empty_cache, has_own_memory, return_freed_memory
from meshrl.rollout.base import RolloutEngine
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.train.engine import Role, TrainEngine


class SharedDevice:
    """engines: by role; none in a rank that only samples. sampler: that of this rank, if it has one."""

    def __init__(
        self,
        spec: WorkerSpec,
        device: torch.device,
        engines: Mapping[Role, TrainEngine],
        sampler: RolloutEngine | None,
    ):
        self._device, self._engines, self._sampler = device, engines, sampler
        colocated = spec.trains and spec.rollout is not None and spec.num_rollout_ranks == 0
        self._releases_sampler = colocated and spec.rollout is not None and bool(spec.rollout.release_memory)
        self._offloads = colocated and spec.train.param_offload and has_own_memory(device)
        self._on_host = False

    def for_training(self) -> None:
        """Free the caches of a sampler without requests, because the next sync drops them anyway, and restore the
        parameters."""
        if isinstance(self._sampler, EmbeddedEngine) and not self._sampler.has_work:
            self._sampler.drop_caches()
        return_freed_memory(self._device)
        self._restore()

    async def for_sync(self) -> None:
        """The train engines have their parameters, and the sampler has room for its weights."""
        self._restore()
        await self._hand_over("weights")

    async def for_sampling(self) -> None:
        """The sampler has the room that the train engines do not need while it works."""
        self._release()
        await self._hand_over("kv_cache")

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """The parameters are on the device during this block."""
        was_on_host = self._on_host
        self._restore()
        try:
            yield
        finally:
            if was_on_host:
                self._release()

    def _restore(self) -> None:
        if self._on_host:
            for engine in self._engines.values():
                engine.restore({"params"})
            self._on_host = False

    def _release(self) -> None:
        if self._offloads:
            for engine in self._engines.values():
                engine.release({"params"})
            self._on_host = True

    async def _hand_over(self, part: str) -> None:
        """Give the memory that torch has cached back to the device, on all ranks: a sampler may be another process, on
        the devices of several ranks (a collective). Then restore this part of the sampler."""
        if self._releases_sampler or self._offloads:
            empty_cache(self._device)
            dist.barrier()
        if self._releases_sampler and self._sampler is not None:
            await self._sampler.restore({part})
