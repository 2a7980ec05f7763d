"""Groups of a fully asynchronous run: started under limits of staleness and of the samplers' load, scored one by one,
and trained together."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from meshrl.config.loop import LoopConfig
from meshrl.core.types import Metric, Prompt
from meshrl.loops.collect import GroupFilter, ScoredBatch, answer, group_id, score
from meshrl.loops.job import Job, ScoredGroup


class GroupLimits:
    """When another group may start, and which groups a step takes. Groups that are not trained yet have their numbers
    in the order of prompts. No clock and no samplers are needed, so the prediction of `meshrl plan --schedule` uses it.

    A group is started while fewer than (finished steps + max_staleness + 1) * prompts_per_step groups were started in
    the run. A step takes the oldest scored groups, as soon as the groups that remain can all be trained in time: those
    that must be trained within the next j steps are at most j * prompts_per_step. By the limit this is possible at the
    latest when all groups are scored. So no sample is more than max_staleness versions old when it is trained, and none
    is dropped for its age.

    Below this limit, the number of groups at a time follows the load: it rises after a step that had to wait for scored
    groups, and falls after one that left many, because groups that wait for the trainer only become older. It is at
    least two steps (max_staleness 0: one), of which one is sampled while the trainer trains the other.

    With loop.oversampling the limit is higher by that fraction of a step, and a step drops this number of groups
    instead of waiting for them.

    versions: the weight version at which each group was started; its tokens have this version or later ones. scored:
    the numbers of the groups that are scored. num_dropped: the number of groups that the last `take` dropped.
    max_running: answers at a time in one sampler. step: the first step.
    """

    def __init__(self, loop: LoopConfig, max_running: int, num_samplers: int, step: int = 0):
        self._per_step, self._group_size = loop.prompts_per_step, loop.samples_per_prompt
        self._num_steps, self._staleness = loop.num_steps, loop.staleness
        self._spare = math.ceil(loop.oversampling * self._per_step)
        self._capacity = max(max_running, self._group_size) * num_samplers  # answers
        self._step, self._num_taken = -1, step * self._per_step  # the step for which groups are taken next
        self._has_waited = False  # for groups to be scored
        self._least = min(2, self._staleness + 1) * self._per_step  # a step that waits, and one that is sampled
        self._window = self._least  # groups at a time, without the spare ones
        self.versions: dict[int, int] = {}
        self.scored: set[int] = set()
        self.num_dropped = 0  # not replaced before the next step, because they would be too old

    def begin_step(self, step: int) -> None:
        """Groups for this step are taken next: the limit rises."""
        self._step, self.num_dropped, self._has_waited = step, 0, False

    @property
    def _has_taken(self) -> bool:
        """Whether the groups of the current step were taken."""
        return self._num_taken > self._step * self._per_step

    def may_start(self, load: int) -> bool:
        """Whether the limits of staleness and of the samplers' load allow another group. load: answers that the
        samplers run or will run."""
        if self._staleness == 0 and self._has_taken:
            return False  # the trainer trains: a group would be too old before the next step
        limit = min(self._step + self._staleness + 1, self._num_steps) * self._per_step + self._spare
        limit = min(limit - self._num_taken - self.num_dropped, self._window + self._spare)
        return len(self.versions) < limit and load + self._group_size <= self._capacity

    def start(self, number: int, version: int) -> None:
        self.versions[number] = version

    def end(self, number: int) -> None:
        """A group is scored, and was not dropped before."""
        self.scored.add(number)

    def remove(self, number: int) -> None:
        """A group is not trained; another may start in its place."""
        del self.versions[number]

    def is_in_time(self, oldest: int, version: int) -> bool:
        """Whether a group with tokens of version `oldest` can be trained before it is too old, after all others.
        version: of the trainer."""
        steps = oldest + self._staleness - version + (not self._has_taken)
        return len(self.versions) < steps * self._per_step

    def take(self, version: int) -> tuple[list[int], list[int]] | None:
        """Remove the oldest scored groups, and those of the others that would become too old; returns both. None: the
        step must wait until another group is scored. version: of the trainer."""
        if len(self.scored) < self._per_step:
            self._has_waited = True
            return None
        by_age = sorted(self.versions, key=self.versions.__getitem__)  # groups of one version as they were started
        taken = {*[number for number in by_age if number in self.scored][: self._per_step]}
        left = [number for number in by_age if number not in taken]
        for position, number in enumerate(left, start=1):
            num_steps = max(0, self.versions[number] + self._staleness - version)  # in which it can be trained
            if position > num_steps * self._per_step + self._spare:
                return None
        # More groups at a time after a step that had to wait for scored ones, fewer after one that left many.
        step, most = self._per_step, (self._staleness + 1) * self._per_step
        if self._has_waited:
            self._window = min(most, self._window + max(1, step // 2))
        elif len(self.scored) - step >= step // 2:
            self._window = max(self._least, self._window - max(1, step // 8))
        late = [number for number in left if self.versions[number] <= version - self._staleness]
        for number in (*taken, *late):
            del self.versions[number]
            self.scored.discard(number)
        self._num_taken += len(taken)
        self.num_dropped = len(late)
        return sorted(taken), late


@dataclass(kw_only=True, slots=True)
class StartedGroup:
    """A group that is not trained yet. before: the data's state before its prompt."""

    prompt: Prompt
    before: dict[str, Any]
    task: asyncio.Task[ScoredGroup]


class GroupBuffer:
    """An asynchronous context manager: when the block ends, unfinished groups are cancelled, and scored ones
    are stored in job.scored, so that a run that returns to a checkpoint samples them only once.

    The limit rises in `take`, so that with max_staleness 0 an evaluation before it has the samplers to itself, as in a
    colocated run.
    """

    def __init__(self, job: Job):
        self._job = job
        max_running, num_samplers = job.cfg.rollout.max_running_requests, len(job.rollouts.routes.ranks)
        self.limits = GroupLimits(job.cfg.loop, max_running, num_samplers, job.step)
        self._groups: dict[int, StartedGroup] = {}  # by ordinal
        self._finished = set[int](job.cursor.get("finished", ()))  # trained or dropped, from the cursor on
        # A run that returned to a checkpoint does not have the later weights any more.
        valid = (group for group in job.scored if max(_versions(group), default=0) <= job.trainer.version)
        self._reusable = {group.trajectories[0].prompt.ordinal: group for group in valid}
        job.scored = []
        self._unsent = set[str]()  # sessions of started groups that have not sent a request yet
        self._filter, self._replaced = GroupFilter(job.cfg), list[ScoredGroup]()
        self._failed: asyncio.Task[ScoredGroup] | None = None
        self._group_ended, self._is_open = asyncio.Event(), True

    async def __aenter__(self) -> GroupBuffer:
        self._job.rollouts.routes.call(on_turn_end=self.fill, on_session_start=self._unsent.discard)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        groups = self._groups.values()
        self._job.scored = [g.task.result() for g in groups if _is_scored(g.task)] + [*self._reusable.values()]
        for group in groups:
            group.task.cancel()
        await asyncio.gather(*(group.task for group in groups), return_exceptions=True)

    def fill(self) -> None:
        """Start groups while the limits of staleness and of the samplers' load allow it."""
        job, size = self._job, self._job.cfg.loop.samples_per_prompt
        # The load counts the requests that started groups will send, too.
        while self._is_open and self.limits.may_start(job.rollouts.routes.num_running + len(self._unsent) * size):
            before = job.feed.state()
            (prompt,) = job.feed.next(1)
            if prompt.ordinal in self._finished:
                continue
            version, again = job.trainer.version, self._reusable.pop(prompt.ordinal, None)
            oldest = version if again is None else min(_versions(again), default=version)
            if again is not None and self.limits.is_in_time(oldest, version):
                task = asyncio.ensure_future(_ready(again))
            else:
                oldest = version
                self._unsent.add(group_id(prompt, "train"))
                task = asyncio.ensure_future(self._sampled(prompt))
            self._groups[prompt.ordinal] = StartedGroup(prompt=prompt, before=before, task=task)
            self.limits.start(prompt.ordinal, oldest)
            task.add_done_callback(partial(self._ended, prompt.ordinal))

    def _ended(self, ordinal: int, task: asyncio.Task[ScoredGroup]) -> None:
        if ordinal in self._groups:  # else it was taken or dropped
            if _is_scored(task) and not self._filter.accepts(task.result().trajectories):
                self._replaced.append(self._groups.pop(ordinal).task.result())
                self._finished.add(ordinal)
                self.limits.remove(ordinal)
            else:
                self.limits.end(ordinal)
            if self._failed is None and not _is_scored(task):
                self._failed = task  # the first one: others may follow from it
            self._group_ended.set()
        self.fill()

    async def _sampled(self, prompt: Prompt) -> ScoredGroup:
        try:
            trajectories = await answer(self._job, [prompt], shows=False)
        finally:
            self._unsent.discard(group_id(prompt, "train"))
        return ScoredGroup(trajectories, await score(self._job, trajectories))

    async def take(self) -> ScoredBatch:
        """Wait for the groups of the next step, remove them and return them."""
        self.limits.begin_step(self._job.step)
        while True:
            self._group_ended.clear()
            self.fill()
            if self._failed is not None:
                self._failed.result()
            if (removed := self.limits.take(self._job.trainer.version)) is not None:
                break
            ready, needed = len(self.limits.scored), self._job.cfg.loop.prompts_per_step
            self._job.run.progress(f"{min(ready, needed)} of {needed} groups")
            await self._group_ended.wait()
        taken, late = removed
        groups = [self._groups.pop(ordinal).task.result() for ordinal in taken]
        for ordinal in late:
            group = self._groups.pop(ordinal)
            group.task.cancel()
            self._unsent.discard(group_id(group.prompt, "train"))  # a task that never ran does not do it
        self._finished |= {*taken, *late}
        self.fill()  # if no request runs, no end of a turn would do it before the next step
        replaced, self._replaced = self._replaced, []
        return ScoredBatch(
            trained=[t for group in groups for t in group.trajectories],
            replaced=[t for group in replaced for t in group.trajectories],
            metrics=[m for group in (*groups, *replaced) for m in group.metrics] + self._filter.next_step(),
        )

    def cursor(self) -> dict[str, Any]:
        """The data's state from which a run continues: before the first prompt that is not trained. finished: the
        ordinals after it that were trained or dropped."""
        first = min(self._groups, default=None)
        state = self._job.feed.state() if first is None else self._groups[first].before
        self._finished = {ordinal for ordinal in self._finished if first is not None and ordinal > first}
        return {**state, "finished": sorted(self._finished)}

    def metrics(self) -> list[Metric]:
        """Groups that wait for the trainer, that are sampled or scored, and that were dropped by the last `take`."""
        scored = len(self.limits.scored)
        return [
            Metric(name="rollout/groups_scored", sum=scored, reduce="sum", unit="groups"),
            Metric(name="rollout/groups_running", sum=len(self._groups) - scored, reduce="sum", unit="groups"),
            Metric(name="rollout/groups_dropped", sum=self.limits.num_dropped, reduce="sum", unit="groups"),
        ]


async def _ready(group: ScoredGroup) -> ScoredGroup:
    return group


def _is_scored(task: asyncio.Task[ScoredGroup]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _versions(group: ScoredGroup) -> list[int]:
    return [int(v) for t in group.trajectories for turn in t.turns for v in turn.versions]
