"""What the groups ask of an executor: call a RankWorker's method in a rank and await its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """All that a rank needs to know to build itself. Ranks 0..num_train_ranks-1 train; with num_rollout_ranks 0 they
    sample too (colocated), otherwise the ranks after them do. rollout None: nobody samples (supervised training)."""

    rank: int
    num_train_ranks: int
    num_rollout_ranks: int
    model: ModelConfig
    train: TrainConfig
    rollout: RolloutConfig | None
    reference: bool
    stop_token_ids: tuple[int, ...]
    rendezvous: str  # file of the process group's store
    timeout_s: float

    @property
    def trains(self) -> bool:
        return self.rank < self.num_train_ranks

    @property
    def samples(self) -> bool:
        return self.rollout is not None and (not self.trains or self.num_rollout_ranks == 0)

    @property
    def num_ranks(self) -> int:
        return self.num_train_ranks + self.num_rollout_ranks


class Executor(Protocol):
    """Runs RankWorkers somewhere. `call(rank, RankWorker.method, *args)` awaits the method's result in that rank.

    Calls of one rank start in the order they were made; calls made in one tick of the event loop arrive together.
    A MeshrlError raised in a rank is raised here as itself; anything else, and a rank's death, as RankFailure.
    """

    specs: Sequence[WorkerSpec]

    async def start(self) -> None: ...

    async def call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any: ...

    async def close(self) -> None: ...
