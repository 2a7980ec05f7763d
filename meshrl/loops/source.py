"""The scored groups of a step, for all schedules, and which of them are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.config.run import RunConfig
from meshrl.core.types import Metric, Trajectory
from meshrl.loops.collect import answer, score
from meshrl.loops.job import Job


@dataclass(kw_only=True, slots=True)
class ScoredBatch:
    """The answers of a step. trained: those of its groups, in the order of their prompts. replaced: those of groups
    that others have replaced. metrics: of the grading of all. cursor: the data's state after these groups."""

    trained: list[Trajectory] = field(default_factory=list)
    replaced: list[Trajectory] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)
    cursor: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[Trajectory]:
        """All of them."""
        return self.trained + self.replaced


class GroupFilter:
    """Accepts the groups of a step which have something to train, and any group once the step has replaced
    loop.max_replaced_groups others. Answers of equal rewards have advantage 0, so they give no gradient; those of equal
    scores differ only in terms that judge no answer, such as length (dynamic sampling: DAPO, arXiv 2503.14476,
    equation 11). Under algo.truncated = mask an answer that was cut off is not trained."""

    def __init__(self, config: RunConfig):
        self._limit, self._weights = config.loop.max_replaced_groups, config.replace_weights
        self._masks = config.algo.truncated == "mask"
        self._num_replaced = 0

    def accepts(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether this scored group is trained; if not, it counts as replaced. Answers without a reward don't count."""
        scored = [t for t in trajectories if t.reward is not None]
        rewards, scores = {t.reward for t in scored}, {self._score(t) for t in scored} - {None}
        trains = not self._masks or any(t.status != "truncated" for t in scored)
        if (trains and min(len(rewards), len(scores)) > 1) or self._num_replaced >= self._limit:
            return True
        self._num_replaced += 1
        return False

    def _score(self, trajectory: Trajectory) -> float | None:
        """The score of loop.replace_by; None if the answer has none."""
        if self._weights is None:
            return trajectory.reward
        values = [(weight, trajectory.rewards.get(name)) for name, weight in self._weights.items()]
        numbers = [weight * value for weight, value in values if isinstance(value, (int, float))]
        return sum(numbers) if numbers else None

    def next_step(self) -> list[Metric]:
        """Start to count again; returns how many groups were replaced, if the config allows any."""
        count, self._num_replaced = self._num_replaced, 0
        if not self._limit:
            return []
        return [Metric(name="rollout/groups_replaced", sum=count, reduce="sum", unit="groups")]


async def next_batch(job: Job) -> ScoredBatch:
    """Sample and score the next prompts_per_step groups that are trained."""
    batch, groups = ScoredBatch(), GroupFilter(job.cfg)
    missing, size = job.cfg.loop.prompts_per_step, job.cfg.loop.samples_per_prompt
    while missing:
        prompts, batch.cursor = job.next_prompts(missing)
        trajectories = await answer(job, prompts, shows=True)
        batch.metrics += await score(job, trajectories)
        for at in range(0, len(trajectories), size):  # they are in the order of their prompts
            group = trajectories[at : at + size]
            if groups.accepts(group):
                batch.trained += group
                missing -= 1
            else:
                batch.replaced += group
    batch.metrics += groups.next_step()
    return batch
