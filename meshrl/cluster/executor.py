"""What the groups need of an executor: to call a RankWorker's method in a rank and await its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import RankFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """All that a rank needs to know to build itself. Ranks 0..num_train_ranks-1 train; with num_rollout_ranks 0 they
    sample too (colocated), otherwise the ranks after them do. rollout None: no rank samples (supervised training)."""

    rank: int
    num_train_ranks: int
    num_rollout_ranks: int
    model: ModelConfig
    train: TrainConfig
    rollout: RolloutConfig | None
    reference: bool
    stop_token_ids: tuple[int, ...]
    rendezvous: str  # where the process group's store is, see cluster/rendezvous.py
    timeout_s: float  # deadline of every phase that deadlines does not name
    deadlines: Mapping[str, float] = field(default_factory=dict)  # seconds by phase
    nodes: int = 1  # machines, with equally many ranks each, in the order of the ranks
    address: str = ""  # under which other machines reach this rank's; empty where there are none

    def deadline_s(self, phase: str) -> float:
        """Seconds that one command of a phase may take."""
        return self.deadlines.get(phase, self.timeout_s)

    @property
    def collective_timeout_s(self) -> float:
        """Of torch.distributed's own waits: longer than every deadline, whose miss names the rank that failed."""
        return max([self.timeout_s, *self.deadlines.values()]) + 60.0

    @property
    def trains(self) -> bool:
        return self.rank < self.num_train_ranks

    @property
    def samples(self) -> bool:
        """Whether this rank has a sampler. One that takes the devices of several ranks is the first one's."""
        if self.rollout is None or (self.trains and self.num_rollout_ranks):
            return False
        first = self.num_train_ranks if self.num_rollout_ranks else 0
        return (self.rank - first) % self.rollout.tp_size == 0

    @property
    def num_ranks(self) -> int:
        return self.num_train_ranks + self.num_rollout_ranks

    @property
    def num_local_ranks(self) -> int:
        """Ranks on this one's machine."""
        return self.num_ranks // self.nodes


class Executor(Protocol):
    """Runs RankWorkers somewhere. `call(rank, RankWorker.method, *args)` awaits the method's result in that rank.

    Calls of one rank start in the order they were made; calls made in one tick of the event loop arrive together.
    A MeshrlError raised in a rank is raised here as itself. Anything else is a RankFailure that names the rank which
    caused it, the phase (`phases.phase_of(method)`) and the cause: an exception, a process that ended, a command not
    answered within `spec.deadline_s(phase)`.

    A rank is lost when it died, or gave no answer and was ended. With a rank that trains, all that train are lost:
    their process group is broken; their calls, under way or later, raise the same failure until `restart_trainers` has
    replaced them. A rank that only samples is lost alone, until `restart` has replaced it. An exception in any rank
    ends every rank, and every call raises it.

    on_lost is called with each failure as soon as it is known, whatever the controller waits for. can_restart_trainers:
    whether `restart_trainers` works here.
    """

    specs: Sequence[WorkerSpec]
    on_lost: Callable[[RankFailure], None]
    can_restart_trainers: bool

    async def start(self) -> None:
        """Bring up all ranks: processes (phase start), then `RankWorker.start` in each (phase load)."""
        ...

    async def call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any: ...

    async def restart(self, rank: int) -> None:
        """Replace a lost rank that only samples by a new one, as `start` leaves it. Raises: RankFailure."""
        ...

    async def restart_trainers(self) -> None:
        """Replace the lost train ranks by new ones with a process group of their own, as `start` leaves them. The
        ranks that only sample are not touched. Raises: RankFailure; then all are lost, and it may be called again."""
        ...

    async def close(self) -> None:
        """End every rank, whatever it does. The end of a good run is `call(rank, RankWorker.stop)` before it."""
        ...
