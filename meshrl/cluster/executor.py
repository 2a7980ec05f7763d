"""The executor protocol: call a RankWorker's method in a rank and await its answer.

Each method belongs to a phase of the run. The deadlines of the phases are in `cluster.deadlines`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import RankFailure
from meshrl.core.types import RoleSpec
from meshrl.monitor.recorder import current_span, recorder
from meshrl.monitor.status import RankProcess
from meshrl.plan.memory import RankMemory
from meshrl.plan.ranks import RankPlan, rank_plan

if TYPE_CHECKING:
    from meshrl.cluster.actors import RankWorker

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_PHASE = "meshrl_phase"


def phase(name: str) -> Callable[[F], F]:
    """Mark a method that the controller calls in ranks with its phase. The rank records its time, and its memory at
    the end, except for phase report."""

    def mark(method: F) -> F:
        @functools.wraps(method)
        def blocking(worker: RankWorker, *args: Any, **kwargs: Any) -> Any:
            with recorder.span(name, "phase", method=method.__name__):
                return method(worker, *args, **kwargs)

        @functools.wraps(method)
        async def overlapping(worker: RankWorker, *args: Any, **kwargs: Any) -> Any:
            with recorder.overlapping(name, method.__name__):
                return await method(worker, *args, **kwargs)

        recorded = method if name == "report" else overlapping if inspect.iscoroutinefunction(method) else blocking
        setattr(recorded, _PHASE, name)
        return cast(F, recorded)

    return mark


def phase_of(method: Callable[..., Any]) -> str:
    """The phase of a method when the controller calls it now; the method's name if it is not marked."""
    name: str = getattr(method, _PHASE, method.__name__)
    return "eval" if name == "rollout" and current_span() == "eval" else name


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Everything that a rank needs to build its engines. Ranks 0..num_train_ranks-1 train; with num_rollout_ranks 0
    they also sample (colocated), otherwise the ranks after them sample. rollout None: no rank samples (SFT)."""

    rank: int
    num_train_ranks: int
    num_rollout_ranks: int
    model: ModelConfig
    train: TrainConfig
    rollout: RolloutConfig | None
    roles: tuple[RoleSpec, ...]  # of the train ranks' engines
    stop_token_ids: tuple[int, ...]
    timeout_s: float  # deadline of every phase that is not in deadlines
    deadlines: Mapping[str, float] = field(default_factory=dict)  # seconds by phase
    seed: int = 0  # run.seed
    logs: Path | None = None  # where servers that a rank starts write their logs, on the rank's machine
    nodes: int = 1  # machines, with equally many ranks each, in the order of the ranks
    memory: RankMemory | None = None  # planned; a rank whose accelerator has less refuses to start
    num_threads: int | None = None  # on a CPU; None = the rank's share of the machine's cores
    # Set by the executor when it starts the rank:
    rendezvous: str | tuple[str, int] = ""  # the store of the process group: a file, or host and port of a TCPStore
    address: str = ""  # at which other machines reach this rank's machine; empty when there are none

    def deadline_s(self, phase: str) -> float:
        """Seconds that one command of a phase may take."""
        return self.deadlines.get(phase, self.timeout_s)

    @property
    def collective_timeout_s(self) -> float:
        """Timeout of torch.distributed: longer than every deadline, because a missed deadline names the failed rank."""
        return max([self.timeout_s, *self.deadlines.values()]) + 60.0

    @property
    def own(self) -> RankPlan:
        """What this rank is."""
        tp = None if self.rollout is None else self.rollout.tp_size
        shape = self.train.mesh_shape(self.num_train_ranks)
        return rank_plan(self.rank, self.num_train_ranks, self.num_rollout_ranks, tp, self.nodes, shape)

    @property
    def trains(self) -> bool:
        return self.own.trains

    @property
    def samples(self) -> bool:
        return self.own.samples

    @property
    def second_copy(self) -> str:
        """As `RolloutConfig.second_copy`; a reason in a rank that does not train and sample."""
        if self.rollout is None or not self.trains:
            return "the rank does not train and sample"
        return self.rollout.second_copy(self.model.lora, self.num_train_ranks, self.num_rollout_ranks)

    @property
    def num_ranks(self) -> int:
        return self.num_train_ranks + self.num_rollout_ranks

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks on this rank's machine."""
        return self.num_ranks // self.nodes

    @property
    def local_rank(self) -> int:
        """This rank's position among those of its machine."""
        return self.own.local_rank


def ignored(*event: object) -> None:
    """What happens to an event that no code waits for."""


class Executor(Protocol):
    """Runs RankWorkers. `call(rank, RankWorker.method, ...)` awaits the method's result in that rank.

    Calls of one rank start in the order in which they were made; calls of one tick of the event loop arrive together.
    A MeshrlError raised in a rank is raised here unchanged. Any other failure is a RankFailure that names the rank that
    caused it, the phase (`phase_of(method)`) and the cause: an exception, a process that ended, or a command
    that was not answered within `spec.deadline_s(phase)`. A sampler has that time again after each token that it
    computes for any request, and a command of phase annotate or train after each micro-batch.

    A rank is lost when its process died, or missed a deadline and was killed. If a train rank is lost, all train ranks
    are lost, because their process group is broken: their running and later calls raise the same failure until
    `restart` has replaced them. If a rank that only samples is lost, the others continue. An exception in any rank ends
    every rank, and every call raises it.

    can_restart_trainers: whether `restart` can replace train ranks.
    """

    specs: Sequence[WorkerSpec]
    can_restart_trainers: bool

    async def start(
        self, on_lost: Callable[[RankFailure], None] = ignored, on_batches: Callable[[int], None] = ignored
    ) -> None:
        """Start all ranks: their processes (phase start), then `RankWorker.start` in each (phase load).

        on_lost is called with each later failure as soon as it is detected, even while the controller waits for
        something else. on_batches is called while rank 0 computes micro-batches, with the number of those of its
        command that have ended.
        """
        ...

    @overload
    async def call(
        self,
        rank: int,
        method: Callable[Concatenate[RankWorker, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...

    @overload
    async def call(
        self, rank: int, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    def failure_of(self, rank: int) -> RankFailure | None:
        """The failure by which this rank is lost; None if it is not lost, or starts again."""
        ...

    def processes(self) -> Sequence[RankProcess]:
        """The processes of all ranks, as each has reported them after its last start; none if they are this one."""
        ...

    def computed_tokens(self, rank: int) -> int:
        """Tokens that this rank's sampler has computed since it started, by its last report."""
        ...

    async def restart(self, ranks: Sequence[int]) -> None:
        """Replace lost ranks by new ones in the state after `start`: ranks that only sample, or all train ranks, which
        get a new process group. Raises: RankFailure; then all of these ranks are lost, and a retry is allowed."""
        ...

    async def close(self) -> None:
        """End every rank, also in the middle of a command. A normal end calls `RankWorker.stop` in each rank first."""
        ...
