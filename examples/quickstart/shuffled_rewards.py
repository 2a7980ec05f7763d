"""The quickstart's control: `meshrl train` with the rewards of each training batch permuted at random.

    python examples/quickstart/shuffled_rewards.py CONFIG [key=value ...]

After scoring, the rewards of a step's training answers are permuted over the entire step, across groups: as many
answers are rewarded as in the real run, but not the right ones. Everything else, including the evaluation, is as CONFIG
describes. If the model still improved, it would not learn from the reward.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from meshrl.cli import main
from meshrl.core.types import Metric, Trajectory
from meshrl.loops.colocated import colocated
from meshrl.loops.job import Job
from meshrl.reward.score import Scorer
from meshrl.run import start


class ShufflingScorer(Scorer):
    """Calls the Scorer that it wraps, then permutes `reward` over the training trajectories of the call."""

    def __init__(self, scorer: Scorer, seed: int):
        self._scorer, self._rng = scorer, random.Random(seed)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Metric]:
        metrics = await self._scorer.score(trajectories)
        scored = [t for t in trajectories if t.purpose == "train" and t.reward is not None]
        rewards = [t.reward for t in scored]
        self._rng.shuffle(rewards)
        for trajectory, reward in zip(scored, rewards, strict=True):
            trajectory.reward = reward
        return metrics

    def check_failures(self, trajectories: Sequence[Trajectory]) -> None:
        self._scorer.check_failures(trajectories)


async def shuffled(job: Job) -> None:
    """The colocated loop with the shuffling scorer."""
    job.scorer = ShufflingScorer(job.scorer, job.cfg.run.seed)
    await colocated(job)


if __name__ == "__main__":
    start.LOOPS["colocated"] = shuffled
    sys.exit(main(["train", *sys.argv[1:]]))
