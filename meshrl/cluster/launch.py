"""Starts the groups of ranks that the config describes: chooses the ranks and the executor. Before that, the ranks that
start on this machine are compared with its devices and CPU cores."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import Executor, WorkerSpec, ignored
from meshrl.cluster.inline import InlineExecutor
from meshrl.cluster.processes import ProcessExecutor
from meshrl.cluster.remote import TorchrunExecutor, is_launched
from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.cluster import ClusterConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.device import device_count, device_type, keep_freed_memory, may_have_own_device, num_cores
from meshrl.core.errors import ConfigError, MeshrlError, RankFailure
from meshrl.core.terminal import print_message
from meshrl.model.limits import model_numbers
from meshrl.plan.decisions import Machine
from meshrl.plan.memory import RankMemory
from meshrl.plan.run_plan import RunPlan, make_plan
from meshrl.sync.layout import Layout

T = TypeVar("T")


class Groups:
    """The running ranks of a run. trainer is None when no rank trains; rollouts is None when no rank samples.

    Lost samplers are replaced at once. Any other failure, also of a replacement, ends `until_failure`.
    """

    def __init__(self, trainer: TrainGroup | None, rollouts: RolloutGroup | None, executor: Executor):
        self.trainer, self.rollouts, self.executor = trainer, rollouts, executor
        self._is_ending = False
        self._failure: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()

    def lost(self, failure: RankFailure) -> None:
        """Replace a lost sampler, or end `until_failure`."""
        if self._is_ending:
            return
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

    async def end(self) -> None:
        """Stop all ranks. A sampler that ends from now on is no failure. Raises: the error of a train rank."""
        self._is_ending = True
        specs = self.executor.specs
        ends = (self.executor.call(spec.rank, RankWorker.stop) for spec in specs)
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, BaseException) and not (isinstance(end, RankFailure) and not specs[end.rank].trains):
                raise end

    def can_restart_after(self, failure: RankFailure) -> bool:
        """Whether `restart_trainers` may help. An exception would be raised again."""
        lost_trainers = failure.kind != "raised" and self.executor.specs[failure.rank].trains
        return lost_trainers and self.executor.can_restart_trainers

    async def restart_trainers(self, layout: Layout | None) -> None:
        """Replace lost train ranks by new ones. They and their colocated samplers have the weights of the model's
        folder. Samplers in their own ranks continue to run, and wait for weights. layout: of the syncs; None when no
        rank samples."""
        if self.rollouts is not None:
            await self.rollouts.invalidate()
        await self.executor.restart([spec.rank for spec in self.executor.specs if spec.trains])
        if self.rollouts is not None and layout is not None:
            await self.rollouts.reconcile(layout)


def plan_of(cfg: RunConfig | SftRunConfig) -> RunPlan:
    """Of a run on this machine, also if the model's config.json can't be read."""
    numbers = None
    with suppress(MeshrlError):  # raised when the ranks are started
        numbers = model_numbers(cfg.model.path)
    return make_plan(cfg, numbers, this_machine(cfg.cluster))


def this_machine(cluster: ClusterConfig) -> Machine:
    """What is known of the machines of the ranks: Ray chooses them later."""
    return Machine(None if cluster.executor == "ray" else device_type(), is_launched())


@asynccontextmanager
async def launched(
    cfg: RunConfig | SftRunConfig,
    num_train_ranks: int,
    num_rollout_ranks: int,
    model: ModelConfig | None = None,
    logs: Path | None = None,
    note: Callable[[str], None] = print_message,
    progress: Callable[[str], None] = ignored,
    memory: Sequence[RankMemory] = (),
    samples: bool = True,
    num_threads: int | None = None,
) -> AsyncIterator[Groups]:
    """Start all ranks, yield the groups, and end every rank, also after an error inside the block. model: in place of
    the config's. logs: an absolute path, see WorkerSpec. note: gets a line for each rank that is replaced. progress:
    of the train ranks, see TrainGroup. memory: as in RunPlan. samples: False = no train rank samples. num_threads:
    of each rank on a CPU, see WorkerSpec. Under torchrun all processes share run.folder (process/run_token.py)."""
    cluster = cfg.cluster
    cfg = cfg if model is None else cfg.model_copy(update={"model": model})
    numbers, num_ranks = model_numbers(cfg.model.path), (num_train_ranks, num_rollout_ranks)
    run_plan = make_plan(cfg, numbers, this_machine(cluster), num_ranks)
    planned = run_plan.config
    specs = [
        WorkerSpec(
            rank=own.rank,
            num_train_ranks=num_train_ranks,
            num_rollout_ranks=num_rollout_ranks,
            model=planned.model,
            train=planned.train,
            rollout=planned.rollout if isinstance(planned, RunConfig) and samples else None,
            roles=run_plan.roles,
            stop_token_ids=(),  # each request has its own
            timeout_s=cluster.timeout_s,
            seed=cfg.run.seed,
            logs=logs,
            nodes=run_plan.ranks[-1].machine + 1,
            memory=memory[0 if own.trains else -1] if memory else None,
            deadlines=planned.cluster.deadlines.model_dump(),
            num_threads=num_threads,
        )
        for own in run_plan.ranks
    ]
    if is_launched() and cluster.executor != "processes":
        raise ConfigError(
            f"cluster.executor is {cluster.executor}, but torchrun (RANK and WORLD_SIZE are set) has started one "
            "process for each rank: use executor processes, or start meshrl without torchrun"
        )
    keep_freed_memory(torch.device("cpu"))  # each step's samples take the memory of the last step's
    executor: Executor
    if cluster.executor == "inline":
        executor = InlineExecutor(specs)
    elif cluster.executor == "ray":
        from meshrl.cluster.ray import RayExecutor  # ray is an optional dependency

        executor = RayExecutor(specs, cluster.address)
    else:  # one process for each rank: a child of this process, or started by torchrun on every machine
        executor = TorchrunExecutor(specs, Path(cfg.run.folder)) if is_launched() else ProcessExecutor(specs)
    try:
        trainer = TrainGroup(executor, progress) if num_train_ranks else None
        rollouts = None
        if any(spec.samples for spec in specs):
            of_loop = cfg.loop if isinstance(cfg, RunConfig) and cfg.loop.kind == "fully_async" else None
            in_flight = of_loop.in_flight if of_loop is not None else "keep"
            rollouts = RolloutGroup(executor, cluster.max_restarts, note, in_flight)
        groups = Groups(trainer, rollouts, executor)
        await executor.start(groups.lost, ignored if trainer is None else trainer.show_batches)
        yield groups
        await groups.end()
    finally:
        await executor.close()


def check_devices(
    cluster: ClusterConfig, rollout: RolloutConfig | None, num_train_ranks: int, num_rollout_ranks: int
) -> str | None:
    """Returns a note when ranks on the CPU share cores. Under Ray there is nothing to check: it reserves a device for
    each rank. Under torchrun every process calls this, for its own machine."""
    if cluster.executor == "ray":
        return None
    num_ranks = num_train_ranks + num_rollout_ranks
    local = range(num_ranks)
    if is_launched():  # those whose processes torchrun has started on this machine
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        first = int(os.environ["RANK"]) // num_local * num_local
        local = range(first, min(first + num_local, num_ranks))
    kind = device_type()
    if kind == "cpu":
        cores = num_cores()
        if is_launched() or num_ranks <= cores:  # torchrun's processes may each have their own cores
            return None
        ranks = f"{num_ranks} ranks (cluster.num_train_ranks + cluster.num_rollout_ranks)"
        return f"{ranks} share the {cores} CPU cores of this machine, so each waits for the others; use at most {cores}"
    has_device = True  # whether a rank that only samples uses one: for its engine, or for a process group of NCCL
    if rollout is not None and rollout.sync_transport != "broadcast":
        has_device = rollout.uses_device
    users = [rank for rank in local if rank < num_train_ranks or has_device]
    devices = device_count()
    if len(users) <= devices or (is_launched() and may_have_own_device()):
        return None
    needing = "1 rank of this machine needs" if len(users) == 1 else f"{len(users)} ranks of this machine need"
    if num_train_ranks:
        asked = f"cluster.num_train_ranks = {num_train_ranks}, cluster.num_rollout_ranks = {num_rollout_ranks}"
    else:
        key = "num_rollout_ranks" if cluster.num_rollout_ranks else "num_train_ranks"
        asked = f"cluster.{key} = {num_rollout_ranks}, which all sample in an evaluation"
    fewer = f"Use at most {devices} (train ranks sample, too, if num_rollout_ranks is 0), or " if devices else ""
    raise ConfigError(
        f"{needing} a device each ({asked}), but the run sees {devices} device{'' if devices == 1 else 's'} of type "
        f"{kind}. {fewer}{'set' if fewer else 'Set'} MESHRL_DEVICE=cpu to run on the CPU"
    )
