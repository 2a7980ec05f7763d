"""Executor `inline`: the only rank is in this process. For a debugger, unit tests and a single GPU."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import WorkerSpec, ignored
from meshrl.core.device import generators_restored
from meshrl.core.errors import ConfigError, RankFailure
from meshrl.monitor.status import RankProcess
from meshrl.parallel.mesh import forget_meshes
from meshrl.process.connect import LOOPBACK, interface_of
from meshrl.process.leases import LeasedFolder


class InlineExecutor:
    """Errors are raised unchanged: the traceback shows the engine's own frames."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        self.specs = specs  # of one rank: the config's check refuses several
        self.can_restart_trainers = False
        self._on_batches: Callable[[int], None] = ignored
        self.worker = RankWorker(specs[0], lambda count: self._on_batches(count))
        self._generators = ExitStack()  # restores the caller's generators, which the rank seeds
        self._home: LeasedFolder | None = None  # of the process group's store; None before `start` and after `close`

    async def start(
        self, on_lost: Callable[[RankFailure], None] = ignored, on_batches: Callable[[int], None] = ignored
    ) -> None:
        """on_lost is never called: this process is the rank."""
        self._on_batches = on_batches
        if self.specs[0].trains and dist.is_initialized():
            raise ConfigError(
                "cluster.executor inline needs the process group of this process, and there is one already: of another "
                "meshrl run in this process, or of your own code. End that first, or use executor processes"
            )
        self._home = LeasedFolder()
        self._generators.enter_context(generators_restored())
        self.worker.spec = dataclasses.replace(self.specs[0], rendezvous=str(self._home.path / "store"))
        name = "GLOO_SOCKET_IFNAME"  # else gloo would listen at the address of the host's name
        is_set = name in os.environ
        os.environ.setdefault(name, interface_of(LOOPBACK) or "lo")
        try:
            self.worker.start()
        finally:
            if not is_set:
                del os.environ[name]

    async def call(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(self.worker, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def failure_of(self, rank: int) -> RankFailure | None:
        return None

    def processes(self) -> Sequence[RankProcess]:
        return ()

    def computed_tokens(self, rank: int) -> int:
        return self.worker.computed_tokens

    async def restart(self, ranks: Sequence[int]) -> None:
        raise AssertionError("the rank is this process, so it can't be lost alone")

    async def close(self) -> None:
        """Free the engines, which contain reference cycles: this process continues."""
        home, self._home = self._home, None
        if home is None:
            return
        self._generators.close()
        await self.worker.stop()
        home.close()
        self.worker = RankWorker(self.specs[0], ignored)
        forget_meshes()
        gc.collect()
