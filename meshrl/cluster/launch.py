"""Starts the groups of ranks that the config describes: chooses the ranks and the executor."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import Executor, WorkerSpec
from meshrl.cluster.groups import RolloutGroup, TrainGroup
from meshrl.cluster.inline import InlineExecutor
from meshrl.cluster.processes import ProcessExecutor
from meshrl.cluster.torchrun import TorchrunExecutor, is_launched
from meshrl.config.cluster import ClusterConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.device import keep_freed_memory
from meshrl.core.errors import ConfigError, RankFailure
from meshrl.model.limits import micro_batch_tokens
from meshrl.sync.layout import Layout

T = TypeVar("T")
_AFTER_START_S = 60.0  # for a rank whose server is ready


class Groups:
    """The running ranks of a run. trainer is None when no rank trains; rollouts is None when no rank samples.

    Lost samplers are replaced at once. Any other failure, also of a replacement, ends `until_failure`.
    """

    def __init__(self, trainer: TrainGroup | None, rollouts: RolloutGroup | None, executor: Executor):
        self.trainer, self.rollouts, self.executor = trainer, rollouts, executor
        self._failure: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()

    def lost(self, failure: RankFailure) -> None:
        """Replace a lost sampler, or end `until_failure`."""
        if self.rollouts is not None and self.rollouts.replacement.is_possible(failure):
            self.rollouts.replacement.start(failure).add_done_callback(self._replacement_ended)
        elif not self._failure.done():
            self._failure.set_result(failure)

    def _replacement_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        # The loss of a train rank that interrupted it has been detected before, and may have been repaired meanwhile.
        if isinstance(error, RankFailure) and not self.executor.specs[error.rank].trains and not self._failure.done():
            self._failure.set_result(error)

    async def until_failure(self, work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
        """The result of `work`. A failure that the groups can't repair is raised as soon as it is detected, even while
        the work waits for something else.

        Waits for: the work, a failure, or the cancellation of this task, by a signal. After the last two it cancels the
        work, and waits for its end; an error of the work itself is raised in any case.
        """
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        interruption: asyncio.CancelledError | None = None
        awaited: set[asyncio.Future[Any]] = {task, self._failure}
        while not task.done():
            try:
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                interruption = error
            awaited = {task}
            if not task.cancelling():
                task.cancel()
        has_lost = task.cancelled() or isinstance(task.exception(), RankFailure)
        if has_lost and interruption is None and self._failure.done():
            failure, self._failure = self._failure.result(), asyncio.get_running_loop().create_future()
            raise failure
        result = task.result()
        if interruption is not None:
            raise interruption
        return result

    def can_restart_after(self, failure: RankFailure) -> bool:
        """Whether `restart_trainers` may help. An exception would be raised again."""
        lost_trainers = failure.kind != "raised" and self.executor.specs[failure.rank].trains
        return lost_trainers and self.executor.can_restart_trainers

    async def restart_trainers(self, layout: Layout | None) -> None:
        """Replace lost train ranks by new ones. They and their colocated samplers have the weights of the model's
        folder. Samplers in their own ranks continue to run, and wait for weights. layout: of the syncs; None when no
        rank samples.

        Raises: RankFailure; a retry is allowed.
        """
        if self.rollouts is not None:
            await self.rollouts.invalidate()
        await self.executor.restart([spec.rank for spec in self.executor.specs if spec.trains])
        if self.rollouts is not None and layout is not None:
            await self.rollouts.reconcile(layout)


def deadlines_of(cluster: ClusterConfig, rollout: RolloutConfig | None) -> dict[str, float]:
    """Seconds by phase, where they are not cluster.timeout_s. A rank loads for as long as its server may take to start,
    unless cluster.deadlines.load is set."""
    deadlines = {phase: seconds for phase, seconds in cluster.deadlines if seconds is not None}
    if rollout is not None and rollout.start_deadline_s:
        deadlines.setdefault("load", max(cluster.timeout_s, rollout.start_deadline_s + _AFTER_START_S))
    return deadlines


def with_fastest_sync(rollout: RolloutConfig, model: ModelConfig, nodes: int) -> RolloutConfig:
    """The config with sync_mode full where the weights stay in shared memory: there all of them are copied in less time
    than their changes are found and written. Adapters are still sent alone. Under torchrun the ranks may be on several
    machines."""
    if nodes > 1 or is_launched() or rollout.sync_transport == "broadcast" or model.lora.enabled:
        return rollout
    return rollout.model_copy(update={"sync_mode": "full"})


@asynccontextmanager
async def launched(
    model: ModelConfig,
    train: TrainConfig,
    rollout: RolloutConfig | None,
    cluster: ClusterConfig,
    *,
    num_train_ranks: int,
    num_rollout_ranks: int,
    reference: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    folder: Path = Path("."),
    logs: Path | None = None,
    seed: int = 0,
) -> AsyncIterator[Groups]:
    """Start all ranks, yield the groups, and end every rank, also after an error inside the block. folder: under
    torchrun, a folder that all processes of the run share (process/run_token.py). logs: an absolute path, see
    WorkerSpec.

    Raises: RankFailure when a rank does not start, or fails while it ends.
    """
    if train.max_tokens_per_microbatch is None and num_train_ranks:
        train = train.model_copy(update={"max_tokens_per_microbatch": micro_batch_tokens(model, train)})
    nodes = math.gcd(cluster.nodes, num_train_ranks + num_rollout_ranks)  # an evaluation may have fewer ranks
    rollout = rollout and with_fastest_sync(rollout, model, nodes)
    specs = [
        WorkerSpec(
            rank=rank,
            num_train_ranks=num_train_ranks,
            num_rollout_ranks=num_rollout_ranks,
            model=model,
            train=train,
            rollout=rollout,
            reference=reference,
            stop_token_ids=stop_token_ids,
            timeout_s=cluster.timeout_s,
            seed=seed,
            logs=logs,
            nodes=nodes,
            deadlines=deadlines_of(cluster, rollout),
        )
        for rank in range(num_train_ranks + num_rollout_ranks)
    ]
    if is_launched() and cluster.executor != "processes":
        raise ConfigError(
            f"cluster.executor is {cluster.executor}, but torchrun (RANK and WORLD_SIZE are set) has started one "
            "process for each rank: use executor processes, or start meshrl without torchrun"
        )
    executor = EXECUTORS[cluster.executor](specs, cluster, folder)
    keep_freed_memory(torch.device("cpu"))  # each step's samples take the memory of the last step's
    try:
        await executor.start()
        groups = Groups(
            TrainGroup(executor) if num_train_ranks else None,
            RolloutGroup(executor, cluster.max_restarts) if any(spec.samples for spec in specs) else None,
            executor,
        )
        executor.on_lost = groups.lost
        yield groups
        executor.on_lost = lambda failure: None  # a sampler that ends from now on is no failure
        ends = (executor.call(spec.rank, RankWorker.stop) for spec in specs)
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, BaseException) and not (isinstance(end, RankFailure) and not specs[end.rank].trains):
                raise end
    finally:
        await executor.close()


def _processes(specs: Sequence[WorkerSpec], cluster: ClusterConfig, folder: Path) -> Executor:
    """One process for each rank: a child of this process, or started by torchrun on every machine."""
    return TorchrunExecutor(specs, folder) if is_launched() else ProcessExecutor(specs)


def _ray(specs: Sequence[WorkerSpec], cluster: ClusterConfig, folder: Path) -> Executor:
    from meshrl.cluster.ray import RayExecutor  # ray is an optional dependency

    return RayExecutor(specs, cluster.address)


EXECUTORS: dict[str, Callable[[Sequence[WorkerSpec], ClusterConfig, Path], Executor]] = {
    "inline": lambda specs, cluster, folder: InlineExecutor(specs),
    "processes": _processes,
    "ray": _ray,
}
