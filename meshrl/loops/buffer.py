"""Groups of a fully asynchronous run: started under a limit, scored one by one, and trained together.

A group is started while fewer than (finished steps + max_staleness + 1) * prompts_per_step groups were started in the
run. A step takes the oldest scored groups, as soon as the groups that remain can all be trained in time: those that
must be trained within the next j steps are at most j * prompts_per_step. By the limit this is possible at the latest
when all groups are scored. So no sample is more than max_staleness versions old when it is trained, and none is
dropped for its age.

Below this limit, the number of groups at a time follows the load: it rises after a step that had to wait for scored
groups, and falls after one that left many, because groups that wait for the trainer only become older. It is at least
two steps (max_staleness 0: one), of which one is sampled while the trainer trains the other.

With loop.oversampling the limit is higher by that fraction of a step, and a step drops this number of groups instead of
waiting for them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from meshrl.core.types import Metric, Prompt
from meshrl.loops.job import Job, ScoredGroup
from meshrl.loops.step import answer, group_id, score


@dataclass(kw_only=True, slots=True)
class Group:
    """A group that is not trained yet. before: the data's state before its prompt. version: of the weights when it was
    started; its tokens have this version or later ones."""

    prompt: Prompt
    before: dict[str, Any]
    version: int
    task: asyncio.Task[ScoredGroup]


class GroupBuffer:
    """An asynchronous context manager: when the block ends, unfinished groups are cancelled, and scored ones
    are stored in job.scored, so that a run that returns to a checkpoint samples them only once.

    The limit rises in `take`, so that with max_staleness 0 an evaluation before it has the samplers to itself, as in a
    colocated run.
    """

    def __init__(self, job: Job):
        loop, self._job = job.cfg.loop, job
        self._per_step, self._staleness = loop.prompts_per_step, loop.staleness
        self._spare = math.ceil(loop.oversampling * self._per_step)
        self._capacity = max(job.cfg.rollout.max_running_requests, loop.samples_per_prompt) * len(job.rollouts.ranks)
        self._groups: dict[int, Group] = {}  # by ordinal
        self._step = -1  # the step for which groups are taken next
        self._num_taken = job.step * self._per_step
        self._finished = set[int](job.cursor.get("finished", ()))  # trained or dropped, from the cursor on
        self._reusable = {group.trajectories[0].prompt.ordinal: group for group in job.scored if _is_valid(group, job)}
        job.scored = []
        self._unsent = set[str]()  # sessions of started groups that have not sent a request yet
        self._num_of, self._num_scored_of = Counter[int](), Counter[int]()  # version -> groups of it, scored ones
        self._scored, self._has_failed = set[int](), False
        self._group_ended = asyncio.Event()
        self._least = min(2, self._staleness + 1) * self._per_step  # a step that waits, and one that is sampled
        self._window = self._least  # groups at a time, without the spare ones
        self._num_dropped = 0  # by the last take; not replaced before the next one, because they would be too old
        self._is_open = False

    async def __aenter__(self) -> GroupBuffer:
        self._is_open = True
        self._job.rollouts.on_turn_end = self.fill
        self._job.rollouts.on_session_start = self._unsent.discard
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._job.rollouts.on_turn_end = lambda: None
        self._job.rollouts.on_session_start = lambda session: None
        groups = self._groups.values()
        self._job.scored = [g.task.result() for g in groups if _is_scored(g)] + [*self._reusable.values()]
        for group in groups:
            group.task.cancel()
        await asyncio.gather(*(group.task for group in groups), return_exceptions=True)

    def fill(self) -> None:
        """Start groups while the limits of staleness and of the samplers' load allow it."""
        job, loop = self._job, self._job.cfg.loop
        if self._staleness == 0 and self._has_taken:
            return  # the trainer trains: a group would be too old before the next step
        limit = min(self._step + self._staleness + 1, loop.num_steps) * self._per_step + self._spare
        limit = min(limit - self._num_taken - self._num_dropped, self._window + self._spare)
        while self._is_open and len(self._groups) < limit:
            load = job.rollouts.num_running + len(self._unsent) * loop.samples_per_prompt  # requests, also future ones
            if load and load + loop.samples_per_prompt > self._capacity:
                return
            before = job.feed.state()
            (prompt,) = job.feed.next(1)
            if prompt.ordinal in self._finished:
                continue
            again = self._reusable.pop(prompt.ordinal, None)
            if again is not None and not self._is_in_time(again):
                again = None
            if again is None:
                self._unsent.add(group_id(prompt, "train"))
            task = asyncio.ensure_future(_ready(again) if again is not None else self._sampled(prompt))
            version = job.trainer.version if again is None else self._oldest(again)
            self._groups[prompt.ordinal] = Group(prompt=prompt, before=before, version=version, task=task)
            self._num_of[version] += 1
            task.add_done_callback(partial(self._ended, prompt.ordinal))

    @property
    def _has_taken(self) -> bool:
        """Whether the groups of the current step were taken."""
        return self._num_taken > self._step * self._per_step

    def _oldest(self, group: ScoredGroup) -> int:
        return min(_versions(group), default=self._job.trainer.version)

    def _is_in_time(self, group: ScoredGroup) -> bool:
        """Whether a reusable group and all that are held can be trained before it is too old."""
        steps = self._oldest(group) + self._staleness - self._job.trainer.version + (not self._has_taken)
        return len(self._groups) < steps * self._per_step

    def _adapt(self, waited: bool, num_left: int) -> None:
        """Allow more groups at a time after a step that had to wait for scored ones, fewer after one that left many."""
        step, most = self._per_step, (self._staleness + 1) * self._per_step
        if waited:
            self._window = min(most, self._window + max(1, step // 2))
        elif num_left >= step // 2:
            self._window = max(self._least, self._window - max(1, step // 8))

    def _ended(self, ordinal: int, task: asyncio.Task[ScoredGroup]) -> None:
        group = self._groups.get(ordinal)
        if group is not None and group.task is task:  # else it was taken or dropped
            self._num_scored_of[group.version] += 1
            self._scored.add(ordinal)
            self._has_failed |= not _is_scored(group)
            self._group_ended.set()
        self.fill()

    async def _sampled(self, prompt: Prompt) -> ScoredGroup:
        try:
            trajectories = await answer(self._job, [prompt])
        finally:
            self._unsent.discard(group_id(prompt, "train"))
        return ScoredGroup(trajectories, await score(self._job, trajectories))

    async def take(self) -> list[ScoredGroup]:
        """Wait for the groups of the next step, remove them and return them, in the order of their prompts. Raises: the
        error of a group."""
        self._step, self._num_dropped, waited = self._job.step, 0, False
        self._num_of, self._num_scored_of = +self._num_of, +self._num_scored_of
        while True:
            self._group_ended.clear()
            self.fill()
            if self._has_failed:
                for group in self._groups.values():
                    if group.task.done():
                        group.task.result()
            if self._may_take:
                self._adapt(waited, len(self._scored) - self._per_step)
                return self._taken()
            waited |= len(self._scored) < self._per_step
            await self._group_ended.wait()

    @property
    def _may_take(self) -> bool:
        """Whether a step's groups are scored, and all that remain can be trained before they are too old."""
        left, to_take = 0, self._per_step
        for version in sorted(self._num_of):
            taken = min(to_take, self._num_scored_of[version])
            left, to_take = left + self._num_of[version] - taken, to_take - taken
            num_steps = max(0, version + self._staleness - self._job.trainer.version)  # in which they can be trained
            if left > num_steps * self._per_step + self._spare:
                return False
        return to_take == 0

    def _taken(self) -> list[ScoredGroup]:
        """Remove the oldest scored groups and return them; drop the others that would become too old."""
        oldest = self._job.trainer.version - self._staleness
        by_age = sorted(self._groups, key=lambda ordinal: (self._groups[ordinal].version, ordinal))
        scored = [ordinal for ordinal in by_age if ordinal in self._scored][: self._per_step]
        taken = [self._pop(ordinal).task.result() for ordinal in sorted(scored)]
        late = [ordinal for ordinal, group in self._groups.items() if group.version <= oldest]
        for ordinal in late:
            group = self._pop(ordinal)
            group.task.cancel()
            self._unsent.discard(group_id(group.prompt, "train"))  # a task that never ran does not do it
        self._finished |= {*scored, *late}
        self._num_taken += len(scored)
        self._num_dropped += len(late)
        self.fill()  # if no request runs, no end of a turn would do it before the next step
        return taken

    def _pop(self, ordinal: int) -> Group:
        group = self._groups.pop(ordinal)
        self._num_of[group.version] -= 1
        self._num_scored_of[group.version] -= ordinal in self._scored
        self._scored.discard(ordinal)
        return group

    def cursor(self) -> dict[str, Any]:
        """The data's state from which a run continues: before the first prompt that is not trained. finished: the
        ordinals after it that were trained or dropped."""
        first = min(self._groups, default=None)
        state = self._job.feed.state() if first is None else self._groups[first].before
        self._finished = {ordinal for ordinal in self._finished if first is not None and ordinal > first}
        return {**state, "finished": sorted(self._finished)}

    def metrics(self) -> list[Metric]:
        """Groups that wait for the trainer, that are sampled or scored, and that were dropped by the last `take`."""
        scored = sum(map(_is_scored, self._groups.values()))
        return [
            Metric(name="rollout/groups_scored", sum=scored, reduce="sum", unit="groups"),
            Metric(name="rollout/groups_running", sum=len(self._groups) - scored, reduce="sum", unit="groups"),
            Metric(name="rollout/groups_dropped", sum=self._num_dropped, reduce="sum", unit="groups"),
        ]


async def _ready(group: ScoredGroup) -> ScoredGroup:
    return group


def _is_scored(group: Group) -> bool:
    return group.task.done() and not group.task.cancelled() and group.task.exception() is None


def _versions(group: ScoredGroup) -> list[int]:
    return [int(v) for t in group.trajectories for turn in t.turns for v in turn.versions]


def _is_valid(group: ScoredGroup, job: Job) -> bool:
    """Whether the group was sampled by weights that the run still has after it returned to a checkpoint."""
    return max(_versions(group), default=0) <= job.trainer.version
