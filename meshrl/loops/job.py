"""Job: what a reinforcement-learning loop holds while it runs, and what a loop needs from the run around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from meshrl.agent.loop import Agent
from meshrl.cluster.groups import RolloutGroup, TrainGroup
from meshrl.config.run import RunConfig
from meshrl.core.types import Metric, Prompt
from meshrl.data.order import PromptFeed
from meshrl.loops.proof import SamplerProof
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.spans import Spans
from meshrl.reward.score import Scorer
from meshrl.sync.layout import Layout


class Resumable(Protocol):
    """The state of a loop, which a run saves and restores. step: finished steps."""

    @property
    def step(self) -> int: ...

    @property
    def is_over(self) -> bool:
        """Whether no further step comes."""

    def snapshot(self) -> dict[str, Any]:
        """What a resumed run needs to know besides tensors, as of the last finished step. It is plain JSON, and a copy,
        because it is written while the run continues."""

    async def restore(self, step: int, saved: dict[str, Any], state: Path) -> None:
        """Set this object and its trainer to the state in which `snapshot` was taken after `step` steps.

        state: the checkpoint's folder of tensors. Raises: CheckpointError or DataError when files, model, data or seed
        are not those of the checkpoint.
        """


class RunServices(Protocol):
    """What a loop needs from the run that it belongs to. restarts: of the train ranks, after failures. ends_early: the
    run ends with the step under way, as if that were the last step of its config."""

    folder: Path
    note: Callable[[str], None]
    spans: Spans
    restarts: int
    ends_early: bool

    def report(self, step: int, metrics: Sequence[Metric]) -> dict[str, float]:
        """Divide, once, and pass the numbers of a step to every sink. Returns the numbers."""

    def updating(self, trainer: TrainGroup) -> AbstractContextManager[None]:
        """Around a step's update: no signal ends the run while weights, data and metrics differ in their step."""

    async def save_if_due(self, job: Resumable, every: int, with_model: bool) -> None:
        """After the last step and every `every` steps (0 = never), write a checkpoint, and the model if `with_model`.
        Raises: what went wrong with the checkpoint before."""

    async def keep_best(self, step: int, score: float) -> None:
        """Write the model of `step` if no earlier score was as high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the model is asked: prompts, the agent that answers them, and how tokens become text."""

    tokenizer: Any
    agent: Agent
    train_prompts: PromptFeed | None
    eval_prompts: list[Prompt]
    num_eval_left_out: int  # held-out prompts over data.max_prompt_tokens
    stop_token_ids: tuple[int, ...]
    max_context_tokens: int


@dataclass(kw_only=True, slots=True)
class Job:
    """The state of one loop. num_updates: optimizer steps requested so far."""

    cfg: RunConfig
    run: RunServices
    task: Task
    trainer: TrainGroup
    rollouts: RolloutGroup
    scorer: Scorer
    layout: Layout
    rollout_log: RolloutLog
    proof: SamplerProof = field(default_factory=SamplerProof)
    step: int = 0
    num_updates: int = 0
    cursor: dict[str, Any] = field(default_factory=dict)  # the data's state after the last finished step
    rewards: list[float] = field(default_factory=list)  # mean training reward of each step
    evals: list[tuple[int, float]] = field(default_factory=list)  # (finished steps, mean@k)
    noted_no_signal: bool = False  # the note that a step had no signal is written once

    @property
    def is_over(self) -> bool:
        return self.step >= self.cfg.loop.num_steps or self.run.ends_early

    @property
    def feed(self) -> PromptFeed:
        """The training prompts, which `meshrl eval` does not load."""
        assert self.task.train_prompts is not None, "training needs data.path"
        return self.task.train_prompts

    def snapshot(self) -> dict[str, Any]:
        return {
            "num_updates": self.num_updates,
            "version": self.trainer.version,
            "data": self.cursor,
            "rewards": list(self.rewards),
            "evals": list(self.evals),
            "proof_threshold": self.proof.threshold,
        }

    async def restore(self, step: int, saved: dict[str, Any], state: Path) -> None:
        self.feed.load_state(saved["data"])
        await self.trainer.load(str(state), saved["version"])
        self.step, self.num_updates, self.cursor = step, saved["num_updates"], saved["data"]
        self.rewards, self.evals = list(saved["rewards"]), [(at, score) for at, score in saved["evals"]]
        self.proof.threshold = saved["proof_threshold"]
