"""Groups whose answers all have the same reward are replaced, up to a limit of each step."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from scripted_samplers import Samplers, job_of, settled, take

from meshrl.config.run import RunConfig
from meshrl.core.errors import Failure
from meshrl.core.types import Prompt, Trajectory
from meshrl.loops.buffer import GroupBuffer
from meshrl.loops.collect import GroupFilter
from meshrl.loops.job import Job


def answers(*rewards: float | None) -> list[Trajectory]:
    prompt = Prompt(id="p", ordinal=0, ids=np.zeros(1, np.int32))
    return [Trajectory(prompt=prompt, group_id="g", index=i, turns=[], reward=r) for i, r in enumerate(rewards)]


def filter_of(limit: int, algo: dict[str, Any] | None = None, **of_loop: Any) -> GroupFilter:
    """For the terms right, long of kind overlong, and mine, which has weight 0."""
    terms = {
        "right": {"kind": "exact_match", "weight": 2},
        "long": {"kind": "overlong"},
        "mine": {"kind": "module:mine", "weight": 0},
    }
    loop = {"num_steps": 1, "max_replaced_groups": limit} | of_loop
    config = {"model": {"path": "m"}, "data": {"path": "d"}, "loop": loop, "reward": {"terms": terms}}
    return GroupFilter(RunConfig.model_validate(config | {"algo": algo or {}}))


def test_a_group_is_accepted_if_its_rewards_differ_or_the_limit_is_reached():
    groups = filter_of(2, replace_by="weighted_sum")
    assert groups.accepts(answers(0.0, 1.0)) and groups.accepts(answers(None, 0.5, 0.25))
    assert not groups.accepts(answers(1.0, 1.0)) and not groups.accepts(answers(None, 1.0))
    assert groups.accepts(answers(0.0, 0.0)), "the step has replaced as many as it may"
    (count,) = groups.next_step()
    assert (count.name, count.sum) == ("rollout/groups_replaced", 2)
    assert not groups.accepts(answers(None, None))
    always = filter_of(0)
    assert always.accepts(answers(1.0, 1.0)) and always.next_step() == []


def graded(*terms: tuple[float, float, float]) -> list[Trajectory]:
    """Answers with these values of right, long and mine."""
    group = answers(*(2 * right + long for right, long, _ in terms))
    for trajectory, values in zip(group, terms):
        trajectory.rewards = dict(zip(("right", "long", "mine"), values))
    return group


@pytest.mark.parametrize(
    ("of_loop", "accepted"),
    [
        ({}, "right"),
        ({"eval_term": None}, "right"),
        ({"eval_term": "mine"}, "mine"),
        ({"eval_term": "mine", "replace_by": "long"}, "long"),
        ({"eval_term": "weighted_sum"}, "right or long"),
        ({"replace_by": "weighted_sum"}, "right or long"),
    ],
)
def test_groups_that_differ_in_another_score_only_are_replaced(of_loop, accepted):
    """Answers that differ in their length alone would be trained on their length alone."""
    groups = {
        "right": graded((1.0, -0.5, 0.0), (0.0, -0.5, 0.0)),
        "long": graded((1.0, 0.0, 0.0), (1.0, -0.5, 0.0)),
        "mine": graded((1.0, 0.0, 1.0), (1.0, -0.5, 0.0)),
    }
    groups["mine"][0].reward = 3.0
    for name, group in groups.items():
        expected = name in accepted or (name == "mine" and ("long" in accepted))
        assert filter_of(9, **of_loop).accepts(group) == expected, name
    assert not filter_of(9, **of_loop).accepts(graded((0.5, 0.0, 1.0), (0.0, 1.0, 0.0))), "equal rewards: no gradient"


def test_a_failed_term_that_decides_gives_no_score():
    group = graded((1.0, 0.0, 1.0), (1.0, -0.5, 0.0))
    group[1].rewards["mine"] = Failure(kind="crash", message="")
    assert not filter_of(9, replace_by="mine").accepts(group)


@pytest.mark.parametrize("truncated", ["mask", "train"])
def test_a_group_whose_answers_were_all_cut_off_has_nothing_to_train_if_they_are_masked(truncated):
    group = graded((1.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    groups = filter_of(9, {"truncated": truncated})
    group[0].status = "truncated"
    assert groups.accepts(group)
    group[1].status = "truncated"
    assert groups.accepts(group) == (truncated != "mask")
    lost = graded((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    lost[0].status = lost[1].status = "truncated"
    lost[2].reward = None
    assert groups.accepts(lost) == (truncated != "mask"), "the only complete answer has no reward"


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
