"""Executor `inline`: the only rank is in this process. For a debugger, unit tests and a single GPU."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import WorkerSpec
from meshrl.core.errors import ConfigError, RankFailure
from meshrl.parallel.mesh import forget_meshes


class InlineExecutor:
    """Errors are raised unchanged: the traceback shows the engine's own frames."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        if len(specs) != 1:
            raise ConfigError(
                f"cluster.executor inline has one rank, but the config needs {len(specs)}; use executor processes"
            )
        self.specs = specs
        self.on_lost: Callable[[RankFailure], None] = lambda failure: None  # never: this process is the rank
        self.can_restart_trainers = False
        self.worker = RankWorker(specs[0])
        self._is_started = False

    async def start(self) -> None:
        if self.specs[0].trains and dist.is_initialized():
            raise ConfigError(
                "cluster.executor inline needs the process group of this process, and there is one already: of another "
                "meshrl run in this process, or of your own code. End that first, or use executor processes"
            )
        self._is_started = True
        self.worker.start()

    async def call(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(self.worker, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def restart(self, rank: int) -> None:
        raise AssertionError("the rank is this process, so it can't be lost alone")

    async def restart_trainers(self) -> None:
        raise AssertionError("the rank is this process, so it can't be lost alone")

    async def close(self) -> None:
        """Free the engines, which contain reference cycles: this process continues."""
        if not self._is_started:
            return
        self._is_started = False
        await self.worker.stop()
        self.worker = RankWorker(self.specs[0])
        forget_meshes()
        gc.collect()
