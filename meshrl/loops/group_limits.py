"""The rules of a fully asynchronous run: when another group may start, and which groups a step takes.

They need no clock and no samplers, so the prediction of `meshrl plan --schedule` uses the same object.

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

import math

from meshrl.config.loop import LoopConfig


class GroupLimits:
    """The groups of a run that are not trained yet, by their numbers in the order of prompts.

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
