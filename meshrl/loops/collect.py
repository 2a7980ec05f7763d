"""Answers to prompts and their scores: agents call the samplers, graders score what they return. And the scored groups
of a step, for all schedules, and which of them are trained."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from meshrl.agent.attempt import attempt, check_attempts
from meshrl.agent.loop import AgentContext, Task
from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.config.cluster import ClusterConfig
from meshrl.config.run import RunConfig
from meshrl.core.errors import DeadlineError, MeshrlError
from meshrl.core.types import Metric, Prompt, Purpose, SamplingParams, Trajectory
from meshrl.loops.job import Job
from meshrl.reward.score import Scorer

Ended = Callable[[Prompt, Trajectory], Awaitable[None]]


async def collect(
    cfg: RunConfig,
    task: Task,
    rollouts: RolloutGroup,
    prompts: Sequence[Prompt],
    purpose: Purpose,
    min_version: int,
    ended: Ended,
) -> list[Trajectory]:
    """All attempts at these prompts, concurrently; returned in the order of prompts and attempts.

    min_version: the oldest weights that may answer. ended: awaited with each attempt as soon as it has ended.
    """
    is_eval = purpose == "eval"
    keys = cfg.eval_sampling if is_eval else cfg.rollout.sampling
    num_attempts = cfg.loop.eval_samples if is_eval else cfg.loop.samples_per_prompt
    sampling = SamplingParams(
        temperature=keys.temperature,
        top_p=keys.top_p,
        top_k=keys.top_k,
        min_p=keys.min_p,
        repetition_penalty=keys.repetition_penalty,
        stop_token_ids=task.stop_token_ids,
        stop=tuple(keys.stop),
    )

    async def one(prompt: Prompt, index: int) -> Trajectory:
        context = AgentContext(
            tokenizer=task.tokenizer,
            sampling=sampling,
            max_new_tokens=keys.max_new_tokens,
            max_context_tokens=task.max_context_tokens,
            run_seed=cfg.run.seed,
            group_id=group_id(prompt, purpose),
            purpose=purpose,
            min_version=min_version,
        )
        trajectory = await attempt(task.agent, prompt, index, rollouts.generate, context, cfg.agent.kind)
        await ended(prompt, trajectory)
        return trajectory

    runs = [one(prompt, index) for prompt in prompts for index in range(num_attempts)]
    try:
        phase = "eval" if is_eval else "rollout"
        return await gather_with_deadline(cfg.cluster, phase, runs, rollouts.computed_tokens)
    finally:
        for prompt in prompts:
            rollouts.routes.end_session(group_id(prompt, purpose))


def group_id(prompt: Prompt, purpose: Purpose) -> str:
    """The id of the group of attempts at a prompt. A held-out prompt may have the id of a training prompt."""
    return f"{'eval:' if purpose == 'eval' else ''}{prompt.id}@{prompt.ordinal}"


async def answer(job: Job, prompts: Sequence[Prompt], shows: bool) -> list[Trajectory]:
    """Answer these training prompts with the current weights or newer ones. shows: the number of answers, as the
    progress of the phase."""
    total, done = len(prompts) * job.cfg.loop.samples_per_prompt, itertools.count(1)

    async def ended(prompt: Prompt, trajectory: Trajectory) -> None:
        if shows:
            job.run.progress(f"{next(done)} of {total} answers")

    with job.run.spans("rollout"):
        return await collect(job.cfg, job.task, job.rollouts, prompts, "train", job.trainer.version, ended)


async def score(job: Job, trajectories: Sequence[Trajectory]) -> list[Metric]:
    """Score the trajectories, within the deadline of the phase; returns the metrics. The caller checks the number of
    failures (`check_failures`) when all trajectories of a step are scored."""
    with job.run.spans("reward"):
        (metrics,) = await gather_with_deadline(job.cfg.cluster, "reward", [job.scorer.score(trajectories)])
    return metrics


def check_failures(cfg: RunConfig, scorer: Scorer, trajectories: Sequence[Trajectory]) -> None:
    """Raises: AgentError or RewardError when too many attempts or gradings failed. trajectories: all of a step."""
    check_attempts(trajectories, cfg.agent.kind, cfg.agent.max_failure_fraction)
    scorer.check_failures(trajectories)


T = TypeVar("T")
_SLACK_S = 10.0  # so that the deadline of a rank's command, which names the rank, comes first
_SHOWN = 3


async def gather_with_deadline(
    cluster: ClusterConfig,
    phase: str,
    jobs: Sequence[Coroutine[Any, Any, T]],
    progress: Callable[[], int] = lambda: 0,
) -> list[T]:
    """The results of the jobs, in order. There is no limit for all of them, as long as some of them end, or `progress`
    returns another number, such as the tokens that have been computed for them.
    """
    tasks = [asyncio.ensure_future(job) for job in jobs]
    limit_s = cluster.deadline_s(phase) + _SLACK_S
    everything, seen = asyncio.gather(*tasks), (0, progress())
    everything.add_done_callback(lambda all_: all_.cancelled() or all_.exception())  # marks the exception as retrieved
    try:
        while not (await asyncio.wait({everything}, timeout=limit_s))[0]:
            before, seen = seen, (sum(task.done() for task in tasks), progress())
            if seen == before:
                waiting = [task for task in tasks if not task.done()]
                places = ""
                for task in waiting[:_SHOWN]:  # its stack, from its outermost coroutine to the innermost
                    frames, coroutine = list[tuple[Any, int]](), cast(Any, task.get_coro())
                    while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
                        frames.append((coroutine.cr_frame, coroutine.cr_frame.f_lineno))
                        coroutine = coroutine.cr_await
                    lines = traceback.StackSummary.extract(iter(frames)).format()
                    places += f"\n{''.join(lines).rstrip()}"
                raise DeadlineError(
                    f"phase {phase!r}: none of {len(waiting)} waiting tasks ended within {limit_s:g} s "
                    f"(cluster.deadlines.{phase}, or cluster.timeout_s, plus {_SLACK_S:g}). They wait at:{places}"
                )
        try:
            return everything.result()
        except asyncio.CancelledError as cause:  # a cancellation of this task is raised by `wait` above
            raise MeshrlError(f"phase {phase!r}: a task was cancelled by the code that it runs") from cause
    finally:
        for task in tasks:
            task.cancel()


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
