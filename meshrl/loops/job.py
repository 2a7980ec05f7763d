"""Job: the state of a reinforcement-learning loop; LoopOutputs and LoopKeeper: what a
loop gets from its run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshrl.agent.loop import Task
from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.run import RunConfig
from meshrl.core.types import Metric, Prompt, Trajectory
from meshrl.data.order import PromptFeed
from meshrl.loops.sync_and_probe import SamplerProof
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.recorder import Spans
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.token_log import TrainerValues
from meshrl.reward.score import Scorer
from meshrl.sync.layout import Layout


class Resumable(Protocol):
    """The state of a loop, which a run saves and restores. step: finished steps."""

    trainer: TrainGroup

    @property
    def step(self) -> int: ...

    @property
    def is_over(self) -> bool:
        """Whether the last step is finished."""

    def snapshot(self) -> dict[str, Any]:
        """The state after the last finished step that a resumed run needs, except tensors. Plain JSON, and a copy,
        because it is written while the run continues."""

    async def restore(self, step: int, saved: dict[str, Any], state: Path | None) -> None:
        """Set this object and its trainer to the state of `snapshot` after `step` steps.

        state: the checkpoint's folder of tensors; None when new train ranks have loaded the weights of model.path, from
        which the run began. Raises: CheckpointError or DataError when files are damaged, or
        model, data or seed differ from those of the checkpoint.
        """


class LoopOutputs(Protocol):
    """What a loop shows and writes.

    ends_early: the run ends after the current step, as if it were the last step of its config. writes: counts the
    failed writes to outputs that end no run.
    """

    folder: Path
    spans: Spans
    writes: FailedWrites
    ends_early: bool

    @property
    def note(self) -> Callable[[str], None]:
        """Print a line for the user."""

    @property
    def record(self) -> Callable[[str], None]:
        """Write a line to run_notes.txt that asks for no action of the user."""

    def progress(self, text: str) -> None:
        """Show how far the current phase is, such as 12 of 64 answers."""

    def record_step(self, step: int, record: dict[str, Any]) -> None:
        """Write the digests of a step (loops/step_record.py). step: counted from 1."""

    def report(
        self, step: int, metrics: Sequence[Metric], evaluation: Mapping[str, str] | None = None
    ) -> dict[str, float]:
        """Compute the values of a step's metrics, once, and pass them to every sink. Returns the values. step: counted
        from 1; for an evaluation, of which this is the identity, the finished steps, 0 before the first one."""


class LoopKeeper(Protocol):
    """What a loop saves. restarts: how often the train ranks were started again after a failure."""

    restarts: int

    def updating(self, job: Resumable) -> AbstractContextManager[None]:
        """Context of a step's update: no signal ends the run while weights, data and metrics are of different steps."""

    async def save_if_due(self, job: Resumable, every: int | None, with_model: bool, eval_every: int = 0) -> None:
        """After the last step and every `every` steps (0 = never), write a checkpoint, and the model if `with_model`.
        every None: a checkpoint without a model every `eval_every` steps, and when the last one is AUTO_SAVE_S old.
        Raises: the error of the previous checkpoint, or of a sink."""

    async def keep_best(self, step: int, score: float) -> None:
        """Write the model of `step` if its score is higher than all earlier ones."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The scored attempts at one prompt, and the metrics of their grading."""

    trajectories: list[Trajectory]
    metrics: list[Metric]


@dataclass(kw_only=True, slots=True)
class Job:
    """The state of one loop. step: finished steps. evaluation: identity of its evaluations, of which the first is after
    first_eval steps."""

    cfg: RunConfig
    run: LoopOutputs
    keeper: LoopKeeper
    task: Task
    trainer: TrainGroup
    rollouts: RolloutGroup
    scorer: Scorer
    layout: Layout
    rollout_log: RolloutLog
    proof: SamplerProof = field(default_factory=SamplerProof)
    step: int = 0
    cursor: dict[str, Any] = field(default_factory=dict)  # the data's state after the last finished step
    rewards: list[float] = field(default_factory=list)  # mean training reward of each step
    evals: list[tuple[int, float]] = field(default_factory=list)  # (finished steps, mean@k)
    evaluation: dict[str, str] = field(default_factory=dict)
    first_eval: int = 0
    num_refused_steps: int = 0  # in succession, in which the engine refused every answer
    num_abstained_steps: int = 0  # in succession, in which no term of the reward applied to any answer
    noted: set[str] = field(default_factory=set)  # notes of this start that are written once
    step_started_at: float = field(default_factory=time.perf_counter)  # of the current step, by time.perf_counter
    probed: list[np.ndarray] | None = None  # contexts of requests that prove the next sync; None = there are none
    probe: asyncio.Task[list[Metric]] | None = None  # of the last sync
    token_values: TrainerValues | None = None  # of the current step, if its rollouts are logged
    record: dict[str, Any] = field(default_factory=dict)  # of the current step, for digests.jsonl
    scored: list[ScoredGroup] = field(default_factory=list)  # not trained yet when the train ranks were lost

    @property
    def is_over(self) -> bool:
        return self.step >= self.cfg.loop.num_steps or self.run.ends_early

    @property
    def feed(self) -> PromptFeed:
        """The training prompts; `meshrl eval` does not load them."""
        assert self.task.train_prompts is not None, "training needs data.path"
        return self.task.train_prompts

    def next_prompts(self, count: int) -> tuple[list[Prompt], dict[str, Any]]:
        """The next `count` prompts, and the data's state after them. Leaves out prompts that fully_async, which trains
        them in another order, trained before this run was resumed."""
        finished, prompts = set(self.cursor.get("finished", ())), list[Prompt]()
        while len(prompts) < count:
            drawn = self.feed.next(count - len(prompts))
            prompts += [prompt for prompt in drawn if prompt.ordinal not in finished]
        later = sorted(ordinal for ordinal in finished if ordinal > prompts[-1].ordinal)
        return prompts, {**self.feed.state(), **({"finished": later} if later else {})}

    def snapshot(self) -> dict[str, Any]:
        return {
            "version": self.trainer.version + (not self.trainer.is_synced),
            "data": self.cursor,
            "rewards": list(self.rewards),
            "evals": list(self.evals),
            "evaluation": self.evaluation,
            "proof_threshold": self.proof.threshold,
        }

    async def restore(self, step: int, saved: dict[str, Any], state: Path | None) -> None:
        if self.probe is not None:
            self.probe.cancel()
        self.probe = None  # self.probed stays: the next sync sends these weights again
        self.feed.load_state(saved["data"])
        await self.trainer.load(state, saved["version"])
        self.step, self.cursor = step, saved["data"]
        now, before = self.cfg.model_dump(mode="json"), saved.get("config", {})
        self.rewards, self.evals = list(saved["rewards"]), [(at, score) for at, score in saved["evals"]]
        earlier = saved.get("evaluation", {})
        if earlier != self.evaluation:
            if self.evals:
                other = [part for part, digest in self.evaluation.items() if earlier.get(part) != digest]
                self.run.note(f"the evaluations have other {', '.join(other)}, so earlier scores are not compared")
            self.evals, self.first_eval = [], step
        is_same = all(before.get(section, now[section]) == now[section] for section in ("model", "rollout"))
        self.proof.threshold = saved["proof_threshold"] if is_same else None  # another engine or dtype rounds otherwise
