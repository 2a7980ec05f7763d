"""From the config to running groups: which ranks, which executor, where they meet."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from meshrl.cluster.executor import Executor, WorkerSpec
from meshrl.cluster.groups import RolloutGroup, TrainGroup
from meshrl.cluster.inline import InlineExecutor
from meshrl.cluster.processes import ProcessExecutor
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.task import ClusterConfig
from meshrl.config.train import TrainConfig

EXECUTORS: dict[str, Callable[[Sequence[WorkerSpec]], Executor]] = {
    "inline": InlineExecutor,
    "processes": ProcessExecutor,
}


@dataclass(frozen=True, slots=True)
class Groups:
    """The running ranks of a run. trainer is None where nothing trains, rollouts where nobody samples."""

    trainer: TrainGroup | None
    rollouts: RolloutGroup | None


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
) -> AsyncIterator[Groups]:
    """Start all ranks, give the groups, and end every rank whatever happens inside.

    Raises: RankFailure when a rank does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="meshrl-") as folder:
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
                rendezvous=str(Path(folder) / "store"),
                timeout_s=cluster.timeout_s,
            )
            for rank in range(num_train_ranks + num_rollout_ranks)
        ]
        executor = EXECUTORS[cluster.executor](specs)
        try:
            await executor.start()
            yield Groups(
                TrainGroup(executor) if num_train_ranks else None,
                RolloutGroup(executor) if any(spec.samples for spec in specs) else None,
            )
        finally:
            await executor.close()
