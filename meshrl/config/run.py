"""The keys of run.*, and the complete configuration of each command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from meshrl.config.agent import AgentConfig
from meshrl.config.algo import AlgoConfig, correction_of_auto
from meshrl.config.base import Slice, field
from meshrl.config.cluster import ClusterConfig
from meshrl.config.data import DataConfig
from meshrl.config.loop import LoopConfig, SftConfig
from meshrl.config.model import ModelConfig
from meshrl.config.monitor import MonitorConfig
from meshrl.config.reward import RewardConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.source import Problem, find
from meshrl.config.train import TrainConfig

if TYPE_CHECKING:
    from meshrl.config.check import Case


class RunSection(Slice):
    name: str = field("auto", "the run's folder below run.folder; auto = the config file's name and the time")
    folder: str = field("runs", "folder that contains the folders of all runs")
    seed: int = field(0, "seed of data order, sampling and all other random choices", ge=0)
    resume: str = field(
        "never",
        "never = a new run, which refuses a folder that has checkpoints; auto = the run continues from its newest "
        "checkpoint, if there is one; or the folder of a checkpoint, of this run or of another",
    )
    keep_checkpoints: int = field(
        2, "number of newest training states to keep on disk; the models of older checkpoints are kept, too", ge=1
    )


class RunConfig(Slice):
    """The complete configuration of `meshrl train`. Only cli, run, loops and cluster see it; a component gets its
    slice."""

    model: ModelConfig = field(..., "the model")
    train: TrainConfig = field(TrainConfig(), "the train engine")
    rollout: RolloutConfig = field(RolloutConfig(), "the rollout engine, which samples")
    algo: AlgoConfig = field(AlgoConfig(), "the algorithm")
    data: DataConfig = field(..., "the data")
    reward: RewardConfig = field(RewardConfig(), "the rewards")
    agent: AgentConfig = field(AgentConfig(), "the agent")
    loop: LoopConfig = field(..., "the schedule")
    cluster: ClusterConfig = field(ClusterConfig(), "where it runs")
    monitor: MonitorConfig = field(MonitorConfig(), "where its metrics are sent")
    run: RunSection = field(RunSection(), "name, folder, seed")

    NUM_STEPS_KEY: ClassVar[str] = "loop.num_steps"
    ROW_LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("data.max_prompt_tokens", "rollout.sampling.max_new_tokens")

    @property
    def longest_row_tokens(self) -> int | None:
        """Tokens of the longest row that can be trained; None where only the model's context limits it."""
        if self.agent.kind == "single_turn":
            return self.data.max_prompt_tokens + self.rollout.sampling.max_new_tokens
        return self.rollout.max_context_tokens

    @property
    def sampling_ranks(self) -> tuple[str, int]:
        """(the key of the number of ranks that sample, this number)."""
        name = "num_rollout_ranks" if self.cluster.num_rollout_ranks else "num_train_ranks"
        return f"cluster.{name}", getattr(self.cluster, name)

    @property
    def correction(self) -> tuple[str, str]:
        """(the kind of algo.correction that is used, the configured kind with the reason)."""
        kind = self.algo.correction.kind
        if kind != "auto":
            return kind, kind
        used, why = self.correction_of_auto
        return used, f"auto: {why}"

    @property
    def correction_of_auto(self) -> tuple[str, str]:
        """(the kind that auto means in this run, why)."""
        return correction_of_auto(self.loop.staleness, self.rollout.engine)

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

    model: ModelConfig = field(..., "the model")
    train: TrainConfig = field(TrainConfig(), "the train engine")
    sft: SftConfig = field(..., "rows and steps")
    cluster: ClusterConfig = field(ClusterConfig(), "where it runs")
    monitor: MonitorConfig = field(MonitorConfig(), "where its metrics are sent")
    run: RunSection = field(RunSection(), "name, folder, seed")

    NUM_STEPS_KEY: ClassVar[str] = "sft.num_steps"
    ROW_LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("sft.max_row_tokens",)

    @property
    def longest_row_tokens(self) -> int | None:
        """As in RunConfig."""
        return self.sft.max_row_tokens

    @property
    def num_updates(self) -> int:
        """As in RunConfig."""
        return self.sft.num_steps

    @property
    def rows_per_update(self) -> int:
        """As in RunConfig."""
        return self.sft.rows_per_step


def run_problems(case: Case) -> Iterator[Problem]:
    name = case.config.run.name
    if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        yield Problem(("run.name",), "must be the name of one folder below run.folder, without slashes.")
    if case.purpose != "eval":
        yield from _resume(case)


def _resume(case: Case) -> Iterator[Problem]:
    run = case.config.run
    if run.resume == "never":
        return
    if run.resume == "auto":
        if run.name == "auto":
            text = "with run.name auto each run gets a new name, so there is no earlier run to resume. Set run.name."
            yield Problem(("run.resume", "run.name"), text)
        return
    path, places = find(case.given["run.resume"], case.folder)
    if path is None:
        looked = " and ".join(str(place) for place in places)
        yield Problem(("run.resume",), f"allowed: never, auto, or a checkpoint's folder; looked for {looked}.")
    elif not ((path / "manifest.json").is_file() or (path / "state" / "manifest.json").is_file()):
        text = (
            f"{path} is not a checkpoint: it has no state/manifest.json. Give a folder such as checkpoints/step_000100."
        )
        yield Problem(("run.resume",), text)
