from __future__ import annotations

from meshrl.config.agent import AgentConfig
from meshrl.config.algo import AlgoConfig
from meshrl.config.base import Slice, field
from meshrl.config.cluster import ClusterConfig
from meshrl.config.data import DataConfig
from meshrl.config.loop import LoopConfig, SftConfig
from meshrl.config.model import ModelConfig
from meshrl.config.monitor import MonitorConfig
from meshrl.config.reward import RewardConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig


class RunSection(Slice):
    name: str = field("auto", "folder below run.folder; auto = the config file's name and the time")
    folder: str = field("runs", "where runs are written")
    seed: int = field(0, "decides data order, sampling and everything else random", ge=0)
    resume: str = field(
        "never",
        "never: the run starts anew, and refuses a folder that has checkpoints; auto: it continues from its newest "
        "checkpoint, if there is one; or the folder of a checkpoint, of this run or of another",
    )
    keep_checkpoints: int = field(
        2, "newest training states that stay on disk; models saved beside older ones stay, too", ge=1
    )


class RunConfig(Slice):
    """The whole configuration of `meshrl train`. Only cli, loops and cluster see it; a component gets its slice."""

    model: ModelConfig = field(..., "the model")
    train: TrainConfig = field(TrainConfig(), "the train engine")
    rollout: RolloutConfig = field(RolloutConfig(), "the sampler")
    algo: AlgoConfig = field(AlgoConfig(), "the algorithm")
    data: DataConfig = field(..., "the data")
    reward: RewardConfig = field(RewardConfig(), "the rewards")
    agent: AgentConfig = field(AgentConfig(), "the agent")
    loop: LoopConfig = field(..., "the schedule")
    cluster: ClusterConfig = field(ClusterConfig(), "where it runs")
    monitor: MonitorConfig = field(MonitorConfig(), "where its numbers go")
    run: RunSection = field(RunSection(), "name, folder, seed")


class SftRunConfig(Slice):
    """The whole configuration of `meshrl sft`."""

    model: ModelConfig = field(..., "the model")
    train: TrainConfig = field(TrainConfig(), "the train engine")
    sft: SftConfig = field(..., "rows and steps")
    cluster: ClusterConfig = field(ClusterConfig(), "where it runs")
    monitor: MonitorConfig = field(MonitorConfig(), "where its numbers go")
    run: RunSection = field(RunSection(), "name, folder, seed")
