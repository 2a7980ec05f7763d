"""The keys of run.*, and the complete configuration of each command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import ClassVar

from pydantic import Field

from meshrl.config.agent import AgentConfig
from meshrl.config.algo import AlgoConfig, correction_of_auto
from meshrl.config.base import Slice
from meshrl.config.case import Case, Problem
from meshrl.config.cluster import ClusterConfig
from meshrl.config.data import DataConfig
from meshrl.config.kinds import REWARDS
from meshrl.config.loop import WEIGHTED_SUM, LoopConfig, SftConfig
from meshrl.config.model import ModelConfig
from meshrl.config.monitor import MonitorConfig
from meshrl.config.reward import PassScore, RewardConfig, full_rewards
from meshrl.config.rollout import RolloutConfig, SamplingConfig
from meshrl.config.train import TrainConfig


class RunSection(Slice):
    name: str = "auto"
    """the run's folder below run.folder; auto = the config file's name and the time"""
    folder: str = "runs"
    """folder that contains the folders of all runs"""
    seed: int = Field(0, ge=0)
    """seed of data order, sampling and all other random choices"""
    resume: str = "never"
    """never = a new run, which refuses a folder that has checkpoints; auto = the run continues from its newest
    checkpoint, if there is one; or the folder of a checkpoint, of this run or of another"""
    module_folder: str | None = None
    """folder in which modules of rewards, agents, advantages and losses are looked for, after the working folder and
    Python's path; null = the folder of the config file, or for a dict the working folder"""
    date: datetime | None = Field(None, strict=False)
    """what chat templates write as the current date (strftime_now), such as 2026-11-28T09:00:00; null = when the run
    started, also after a resume and in evaluations of its models"""
    keep_checkpoints: int = Field(2, ge=1)
    """number of newest training states to keep on disk"""
    keep_models: int | None = Field(None, ge=1)
    """number of newest exported models to keep on disk; null = all. In addition, the model with the best evaluation is
    kept"""
    ignore_plan: bool = False
    """start also if the planned memory (`meshrl plan`) is more than a device has, or this machine for ranks on a CPU"""


class RunConfig(Slice):
    """The complete configuration of `meshrl train`. Only cli, run, loops and cluster see it; a component gets its
    slice."""

    model: ModelConfig
    """the model"""
    train: TrainConfig = TrainConfig()
    """the train engine"""
    rollout: RolloutConfig = RolloutConfig()
    """the rollout engine, which samples"""
    algo: AlgoConfig = AlgoConfig()
    """the algorithm"""
    data: DataConfig
    """the data"""
    reward: RewardConfig = RewardConfig()
    """the rewards"""
    agent: AgentConfig = AgentConfig()
    """the agent"""
    loop: LoopConfig
    """the schedule"""
    cluster: ClusterConfig = ClusterConfig()
    """where it runs"""
    monitor: MonitorConfig = MonitorConfig()
    """where its metrics are sent"""
    run: RunSection = RunSection()
    """name, folder, seed"""

    DEFAULT_LR: ClassVar[float] = 1e-6
    LORA_LR: ClassVar[float] = 1e-5  # ten times that of full fine-tuning: Schulman et al., LoRA Without Regret, 2025
    NUM_STEPS_KEY: ClassVar[str] = "loop.num_steps"
    ROW_LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("data.max_prompt_tokens", "rollout.sampling.max_new_tokens")

    @property
    def longest_row_tokens(self) -> int | None:
        """Tokens of the longest row that can be trained; None where only the model's context limits it."""
        if self.agent.kind == "single_turn":
            return self.data.max_prompt_tokens + self.rollout.sampling.max_new_tokens
        return self.rollout.max_context_tokens

    @property
    def eval_sampling(self) -> SamplingConfig:
        """The sampling parameters of evaluations."""
        overrides = {name: value for name, value in self.rollout.eval_sampling if value is not None}
        greedy = {"temperature": 0.0} if self.loop.eval_samples == 1 else {}
        return self.rollout.sampling.model_copy(update=greedy | overrides)

    def of_eval_set(self, name: str) -> RunConfig:
        """For this one of data.eval_sets, if there is one: with its sampling."""
        if (own := self.data.eval_sets.get(name)) is None:
            return self
        data = self.data.model_copy(update={"eval_sets": {}})
        changed = {key: value for key, value in own.sampling if value is not None}
        sampling = self.rollout.eval_sampling.model_copy(update=changed)
        loop = self.loop.model_copy(update={"eval_samples": own.samples or self.loop.eval_samples})
        rollout = self.rollout.model_copy(update={"eval_sampling": sampling})
        return self.model_copy(update={"data": data, "loop": loop, "rollout": rollout})

    @property
    def eval_term(self) -> str:
        """The value of loop.eval_term, or its default."""
        return self.loop.eval_term or WEIGHTED_SUM

    @property
    def eval_pass_score(self) -> PassScore:
        """The value of loop.eval_pass_score, or its default."""
        if self.loop.eval_pass_score is not None or self.eval_term != WEIGHTED_SUM:
            return 1.0 if self.loop.eval_pass_score is None else self.loop.eval_pass_score
        return full_rewards((name, term.kind, term.weight) for name, term in self.reward.terms.items())

    @property
    def replace_weights(self) -> dict[str, float] | None:
        """The weight of each reward term in the score of loop.replace_by; None = the score is the reward."""
        loop, terms = self.loop, self.reward.terms
        if (by := loop.replace_by or loop.eval_term) is not None:
            return None if by == WEIGHTED_SUM else {by: 1.0}
        weights = {n: t.weight for n, t in terms.items() if not (t.kind in REWARDS and REWARDS[t.kind].judges_form)}
        return weights if any(weights.values()) and len(weights) < len(terms) else None

    @property
    def sampling_ranks(self) -> tuple[str, int]:
        """(the key of the number of ranks that sample, this number)."""
        name = "num_rollout_ranks" if self.cluster.num_rollout_ranks else "num_train_ranks"
        return f"cluster.{name}", getattr(self.cluster, name)

    @property
    def correction(self) -> tuple[str, str]:
        """(the kind of algo.correction that is used, the configured kind with the reason); auto where the device of the
        loss decides."""
        kind = self.algo.correction.kind
        if kind != "auto":
            return kind, kind
        used, reason = correction_of_auto(self.loop.staleness, self.rollout.engine)
        return used, f"auto: {reason}"

    @property
    def peak_lr(self) -> float:
        """train.optimizer.lr, or its default for this command and model.lora."""
        return _peak_lr(self)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the run."""
        return self.loop.num_steps * self.train.updates_per_step

    @property
    def rows_per_update(self) -> int:
        """Rows of one optimizer step."""
        return self.loop.prompts_per_step * self.loop.samples_per_prompt // self.train.updates_per_step


class SftRunConfig(Slice):
    """The complete configuration of `meshrl sft`."""

    model: ModelConfig
    """the model"""
    train: TrainConfig = TrainConfig()
    """the train engine"""
    sft: SftConfig
    """rows and steps"""
    cluster: ClusterConfig = ClusterConfig()
    """where it runs"""
    monitor: MonitorConfig = MonitorConfig()
    """where its metrics are sent"""
    run: RunSection = RunSection()
    """name, folder, seed"""

    DEFAULT_LR: ClassVar[float] = 1e-5
    LORA_LR: ClassVar[float] = 1e-4
    NUM_STEPS_KEY: ClassVar[str] = "sft.num_steps"
    ROW_LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("sft.max_row_tokens",)

    @property
    def longest_row_tokens(self) -> int | None:
        return self.sft.max_row_tokens

    @property
    def peak_lr(self) -> float:
        return _peak_lr(self)

    @property
    def num_updates(self) -> int:
        return self.sft.num_steps

    @property
    def rows_per_update(self) -> int:
        return self.sft.rows_per_step


def _peak_lr(config: RunConfig | SftRunConfig) -> float:
    default = config.LORA_LR if config.model.lora.enabled else config.DEFAULT_LR
    return default if config.train.optimizer.lr is None else config.train.optimizer.lr


_MAX_NAME_BYTES = 255


def run_problems(case: Case) -> Iterator[Problem]:
    name = case.config.run.name
    if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        yield Problem(("run.name",), "must be the name of one folder below run.folder, without slashes.")
    if len(name.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES:
        yield Problem(("run.name",), f"must have at most {_MAX_NAME_BYTES} bytes, the limit for the name of a folder.")
    if case.purpose != "eval":
        yield from _resume(case)


def _resume(case: Case) -> Iterator[Problem]:
    run = case.config.run
    if run.resume == "never":
        return
    if run.resume == "auto":
        if run.name == "auto":
            text = "with run.name auto each run gets a new name, so there is no earlier run to resume. Set run.name."
            yield Problem(("run.resume", "run.name"), text, void=("run.resume",))
        return
    path, places = case.find("run.resume")
    if path is None:
        looked = " and ".join(str(place) for place in places)
        yield Problem(("run.resume",), f"allowed: never, auto, or a checkpoint's folder; looked for {looked}.")
    elif not ((path / "manifest.json").is_file() or (path / "state" / "manifest.json").is_file()):
        text = f"{path} is not a checkpoint: it has no state/manifest.json. Give a folder such as "
        yield Problem(("run.resume",), f"{text}checkpoints/step_000100.")
