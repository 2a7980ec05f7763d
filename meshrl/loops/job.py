"""Job: everything a reinforcement-learning loop holds while it runs. Built by loops/run.py, read by the verbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.agent.loop import Agent
from meshrl.cluster.groups import RolloutGroup, TrainGroup
from meshrl.config.run import RunConfig
from meshrl.core.types import Metric, Prompt
from meshrl.data.order import PromptFeed
from meshrl.loops.checkpoints import Checkpoints
from meshrl.loops.proof import SamplerProof
from meshrl.loops.stop import Stop
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.sinks import Sink, report
from meshrl.monitor.spans import Spans
from meshrl.reward.score import Scorer
from meshrl.sync.manifest import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is asked of the model: prompts, who answers them, and how tokens become text."""

    tokenizer: Any
    agent: Agent
    train_prompts: PromptFeed | None
    eval_prompts: list[Prompt]
    num_eval_left_out: int  # held-out prompts over data.max_prompt_tokens
    stop_token_ids: tuple[int, ...]
    max_context_tokens: int


@dataclass(kw_only=True, slots=True)
class Job:
    """One run. restarts: of the train ranks, from a checkpoint, after failures. step counts finished rollout steps,
    num_updates the optimizer steps asked for so far."""

    cfg: RunConfig
    folder: Path
    task: Task
    trainer: TrainGroup
    rollouts: RolloutGroup
    scorer: Scorer
    layout: Layout
    sinks: Sequence[Sink]
    note: Callable[[str], None]
    rollout_log: RolloutLog
    checkpoints: Checkpoints
    stop: Stop
    spans: Spans
    restarts: int = 0
    proof: SamplerProof = field(default_factory=SamplerProof)
    step: int = 0
    num_updates: int = 0
    cursor: dict[str, Any] = field(default_factory=dict)  # the data's state after the last finished step
    exported_step: int = 0  # of the newest model written; 0 = none yet
    rewards: list[float] = field(default_factory=list)  # mean training reward of each step
    evals: list[tuple[int, float]] = field(default_factory=list)  # (finished steps, mean@k)
    noted_no_signal: bool = False  # a note said that a step had no signal; it comes once

    @property
    def is_over(self) -> bool:
        """Whether no further step comes."""
        return self.step >= self.cfg.loop.num_steps or self.stop.after_step

    def report(self, step: int, metrics: Sequence[Metric]) -> dict[str, float]:
        """Divide, once, and hand the step's numbers to every sink."""
        return report(self.sinks, step, metrics)
