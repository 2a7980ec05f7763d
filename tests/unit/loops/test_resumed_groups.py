"""Groups of a fully asynchronous run that continues from a checkpoint: which are used again or sampled again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from scripted_samplers import NUM_STEPS, PER_STEP, Samplers, job_of, settled, take, turn

from meshrl.core.types import Prompt, Trajectory
from meshrl.loops.buffer import GroupBuffer
from meshrl.loops.job import ScoredGroup


@pytest.mark.parametrize(
    ("turns", "num_in_time"),
    [
        ([], 5),
        ([[6]], 5),
        ([[5]], 4),
        ([[4]], 2),
        ([[3]], 0),
        ([[4, 5, 6]], 2),
        ([[6], [4]], 2),
        ([[6, 5], [6]], 4),
    ],
)
def test_groups_that_can_not_all_be_trained_in_time_are_sampled_again(turns, num_in_time):
    """After a return to version 6, with staleness 2, tokens of version 4 can only be trained in the next step, those of
    version 5 in the next two. A group is as old as its oldest token. Groups without tokens are not too old."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 2, step=6)
        for ordinal in range(5):
            prompt = Prompt(id=str(ordinal), ordinal=ordinal, ids=np.array([ordinal], np.int32))
            newest, scored = (
                Trajectory(prompt=prompt, group_id="g", index=index, turns=[turn(versions) for versions in of_answer])
                for index, of_answer in enumerate(([[6]] if turns else [], turns))
            )
            job.scored.append(ScoredGroup([newest, scored], []))
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            sampled = [*range(num_in_time, 4)]
            assert samplers.started[: len(sampled)] == sampled
            if num_in_time >= PER_STEP:
                assert await step == [0, 1]
                await settled()
                assert samplers.started == [*range(num_in_time, 6)]
            step.cancel()

    asyncio.run(scenario())


def test_a_group_that_is_used_again_is_trained_before_newer_ones():
    """After a return to version 6, group 3 has tokens of version 5; the groups before it are sampled with version 6."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 2, step=6)
        prompt = Prompt(id="3", ordinal=3, ids=np.array([3], np.int32))
        job.scored = [ScoredGroup([Trajectory(prompt=prompt, group_id="g", index=0, turns=[turn([5])])], [])]
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            assert samplers.started == [0, 1, 2]
            await samplers.finish(1, 2, versions=(6,))
            assert await step == [1, 3]

    asyncio.run(scenario())


def test_another_schedule_leaves_out_prompts_that_were_trained():
    """Fully_async trained the prompts 1 and 4; a run that continues as another kind draws 0, 2, 3 and 5."""
    job = job_of(Samplers(), 2, step=1)
    job.cursor = {**job.feed.state(), "finished": [1, 4]}
    drawn = []
    for finished in ([4], None):
        prompts, job.cursor = job.next_prompts(job.cfg.loop.prompts_per_step)
        drawn += [prompt.ordinal for prompt in prompts]
        assert job.cursor.get("finished") == finished
    assert drawn == [0, 2, 3, 5]


def test_a_run_continues_with_the_groups_that_are_not_trained():
    """Groups 1 and 3 were trained; the resumed run starts 0, 2, 4 and 5."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 2)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            await samplers.finish(3, 1)
            await step
        resumed = Samplers()
        again = job_of(resumed, 2, step=1)
        again.cursor = job.cursor
        again.feed.load_state(job.cursor)
        async with GroupBuffer(again) as buffer:
            step = asyncio.ensure_future(take(buffer, again))
            await settled()
            assert resumed.started == [0, 2, 4, 5]
            step.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_interrupted_after_any_step_trains_each_prompt_once(seed):
    """At random steps the run ends, and continues from a saved cursor of this or an earlier step: of the steps
    that remain, each trains two prompts, and no prompt is trained twice."""
    random = np.random.default_rng(seed)

    async def part(first: int, cursor: dict[str, Any], num_steps: int) -> list[tuple[list[int], dict[str, Any]]]:
        samplers, steps = Samplers(), []
        job = job_of(samplers, 2, step=first)
        if cursor:
            job.cursor = json.loads(json.dumps(cursor))
            job.feed.load_state(job.cursor)
        async with GroupBuffer(job) as buffer:
            for _ in range(num_steps):
                step = asyncio.ensure_future(take(buffer, job))
                while not step.done():
                    await settled()
                    if running := [o for o, future in samplers.ended.items() if not future.done()]:
                        await samplers.finish(int(random.choice(running)), versions=(job.trainer.version,))
                steps.append((await step, job.cursor))
        return steps

    done: list[tuple[list[int], dict[str, Any]]] = []
    while len(done) < NUM_STEPS:
        done = done[: max(0, len(done) - int(random.integers(3)))]
        cursor = done[-1][1] if done else {}
        done += asyncio.run(part(len(done), cursor, min(4, NUM_STEPS - len(done))))
    assert all(ordinals == sorted(ordinals) and len(ordinals) == PER_STEP for ordinals, _ in done)
    assert sorted(o for ordinals, _ in done for o in ordinals) == [*range(NUM_STEPS * PER_STEP)]
    assert done[-1][1]["finished"] == []


@pytest.mark.parametrize("version", [0, 1])
def test_groups_of_lost_weights_are_sampled_again(version):
    """A run that returns to version 1 uses the scored group 1 again if all its tokens have version 1 or less."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 1, step=version)
        tokens = [0, 1]
        prompt = Prompt(id="1", ordinal=1, ids=np.array([1], np.int32))
        scored = Trajectory(prompt=prompt, group_id="1@1", index=0, turns=[turn(tokens)])
        job.scored = [ScoredGroup([scored], [])]
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            assert samplers.started == ([0, 2, 3] if version else [0, 1, 2, 3])
            step.cancel()

    asyncio.run(scenario())


def test_scored_groups_survive_the_end_of_the_block():
    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 1)
        with pytest.raises(RuntimeError, match="lost"):
            async with GroupBuffer(job) as buffer:
                step = asyncio.ensure_future(take(buffer, job))
                await settled()
                await samplers.finish(2)
                step.cancel()
                raise RuntimeError("the train ranks were lost")
        assert [group.trajectories[0].prompt.ordinal for group in job.scored] == [2]

    asyncio.run(scenario())
