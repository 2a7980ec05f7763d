"""The quickstart's control: `meshrl train` with the rewards of each training batch permuted at random.

    python examples/quickstart/shuffled_rewards.py CONFIG [key=value ...]

After scoring, the rewards of a step's training answers are permuted over the whole step, across groups: as many
answers are rewarded as in the real run, but not the right ones. All else, evaluation included, is the run that CONFIG
describes. If the model still got better, the reward would not be what teaches it.
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
    """Scores as the Scorer it wraps, then permutes `reward` over the training trajectories of the call."""

    def __init__(self, scorer: Scorer, seed: int):
        self._scorer, self._rng = scorer, random.Random(seed)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Metric]:
        metrics = await self._scorer.score(trajectories)
        paid = [t for t in trajectories if t.purpose == "train" and t.reward is not None]
        rewards = [t.reward for t in paid]
        self._rng.shuffle(rewards)
        for trajectory, reward in zip(paid, rewards, strict=True):
            trajectory.reward = reward
        return metrics


async def shuffled(job: Job) -> None:
    """The colocated loop with another scorer."""
    job.scorer = ShufflingScorer(job.scorer, job.cfg.run.seed)
    await colocated(job)


if __name__ == "__main__":
    start.LOOPS["colocated"] = shuffled
    sys.exit(main(["train", *sys.argv[1:]]))
