"""Groups whose answers all have the same reward are replaced, up to a limit of each step."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from scripted_samplers import Samplers, job_of, settled, take

from meshrl.config.run import LoopConfig
from meshrl.core.types import Prompt, Trajectory
from meshrl.loops.buffer import GroupBuffer
from meshrl.loops.job import Job
from meshrl.loops.source import GroupFilter


def answers(*rewards: float | None) -> list[Trajectory]:
    prompt = Prompt(id="p", ordinal=0, ids=np.zeros(1, np.int32))
    return [Trajectory(prompt=prompt, group_id="g", index=i, turns=[], reward=r) for i, r in enumerate(rewards)]


def test_a_group_is_accepted_if_its_rewards_differ_or_the_limit_is_reached():
    groups = GroupFilter(LoopConfig(num_steps=1, max_replaced_groups=2))
    assert groups.accepts(answers(0.0, 1.0)) and groups.accepts(answers(None, 0.5, 0.25))
    assert not groups.accepts(answers(1.0, 1.0)) and not groups.accepts(answers(None, 1.0))
    assert groups.accepts(answers(0.0, 0.0)), "the step has replaced as many as it may"
    (count,) = groups.next_step()
    assert (count.name, count.sum) == ("rollout/groups_replaced", 2)
    assert not groups.accepts(answers(None, None))
    always = GroupFilter(LoopConfig(num_steps=1))
    assert always.accepts(answers(1.0, 1.0)) and always.next_step() == []


def replacing(samplers: Samplers, limit: int, staleness: int = 0) -> Job:
    """A job in which the two answers to each third prompt differ."""
    job = job_of(samplers, staleness, max_replaced_groups=limit)
    samplers.rewards = lambda ordinal, index: float(ordinal % 3 == 2 and index)
    return job


def test_a_group_starts_in_the_place_of_each_replaced_one_and_a_resume_samples_none_of_them_again():
    async def scenario() -> None:
        samplers = Samplers()
        job = replacing(samplers, 9)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            assert samplers.started == [0, 1]
            await samplers.finish(0, 1)
            assert samplers.started == [0, 1, 2, 3]
            await samplers.finish(3, 2)
            assert samplers.started == [0, 1, 2, 3, 4]
            await samplers.finish(4)
            await samplers.finish(5)
            assert await step == [2, 5]
            assert job.cursor["next_ordinal"] == 6 and job.cursor["finished"] == []

    asyncio.run(scenario())


def test_a_run_that_continues_before_a_group_that_was_not_trained_leaves_out_replaced_ones():
    async def scenario() -> None:
        samplers = Samplers()
        job = replacing(samplers, 9, staleness=1)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            await samplers.finish(1, 3)
            await samplers.finish(5, 2)
            assert await step == [2, 5]
            assert job.cursor["next_ordinal"] == 0 and job.cursor["finished"] == [1, 2, 3, 5]

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_at_the_limit_any_group_is_trained(limit: int):
    async def scenario() -> None:
        samplers = Samplers()
        job = replacing(samplers, limit)
        samplers.rewards = lambda ordinal, index: 0.0
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            for ordinal in range(limit + 2):
                await samplers.finish(ordinal)
            assert await step == [limit, limit + 1]

    asyncio.run(scenario())
