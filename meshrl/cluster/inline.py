"""Executor `inline`: the one rank lives in this very process. For a debugger, unit tests and a single GPU."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import WorkerSpec
from meshrl.core.errors import ConfigError, RankFailure
from meshrl.parallel.mesh import forget_meshes


class InlineExecutor:
    """Errors fly through unchanged: the traceback shows the engine's own frames."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        if len(specs) != 1:
            raise ConfigError(
                f"cluster.executor inline holds one rank, but {len(specs)} were asked for; use executor processes"
            )
        self.specs = specs
        self.on_lost: Callable[[RankFailure], None] = lambda failure: None  # never: this process is the rank
        self.can_restart_trainers = False
        self.worker = RankWorker(specs[0])

    async def start(self) -> None:
        self.worker.start()

    async def call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        result = method(self.worker, *args)
        return await result if inspect.isawaitable(result) else result

    async def restart(self, rank: int) -> None:
        raise AssertionError("a rank that is this process is never lost alone")

    async def restart_trainers(self) -> None:
        raise AssertionError("ranks that are this process are never lost alone")

    async def close(self) -> None:
        """This process goes on, so nothing of the engines is left to it, which are rings of objects."""
        await self.worker.stop()
        self.worker = RankWorker(self.specs[0])
        forget_meshes()
        gc.collect()
