from __future__ import annotations

from meshrl.config.algo import AlgoConfig
from meshrl.config.base import Slice, field
from meshrl.config.model import ModelConfig
from meshrl.config.monitor import MonitorConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.task import AgentConfig, ClusterConfig, DataConfig, LoopConfig, RewardConfig, RunSection, SftConfig
from meshrl.config.train import TrainConfig


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
