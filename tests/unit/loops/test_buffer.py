"""The buffer of a fully asynchronous run: which groups start and are trained."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from scripted_samplers import NUM_STEPS, PER_STEP, Samplers, job_of, settled, take, trained

from meshrl.cluster.sampler_group import Routes
from meshrl.core.errors import DataError
from meshrl.loops.buffer import GroupBuffer, GroupLimits


@pytest.mark.parametrize("oversampling", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("staleness", [0, 1])
def test_between_a_take_and_the_next_step_groups_start_only_if_they_may_be_a_version_old(staleness, oversampling):
    limits = GroupLimits(job_of(Samplers(), staleness, oversampling).cfg.loop, max_running=256, num_samplers=1)
    limits.begin_step(0)
    for number in range(PER_STEP):
        limits.start(number, 0)
        limits.end(number)
    assert limits.take(0) == ([0, 1], [])
    assert limits.may_start(0) == (staleness > 0)
    limits.begin_step(1)
    assert limits.may_start(0)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_limit_allows_max_staleness_steps_ahead(staleness):
    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, staleness)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            started = [*range((staleness + 1) * PER_STEP)]
            assert samplers.started == started
            await samplers.finish(0, 1)
            assert await step == [0, 1]
            await settled()
            assert samplers.started == started, "the limit rises when the next step takes its groups"

    asyncio.run(scenario())


def test_the_number_of_groups_at_a_time_follows_the_load():
    """It starts with two steps, rises after steps that had to wait, and falls after one that left scored groups."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 3)
        async with GroupBuffer(job) as buffer:
            for expected in (4, 5, 6):
                step = asyncio.ensure_future(take(buffer, job))
                await settled()
                running = [o for o, future in samplers.ended.items() if not future.done()]
                assert len(running) == expected
                await samplers.finish(*running[:2], versions=(job.step,))
                await step
            await samplers.finish(*(o for o, future in samplers.ended.items() if not future.done()))
            before = buffer.limits._window
            await take(buffer, job)
            assert buffer.limits._window == before - 1

    asyncio.run(scenario())


def test_the_number_of_groups_rises_after_a_wait_that_ended_with_more_groups_than_the_step_takes():
    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 3)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            assert samplers.started == [0, 1, 2, 3]
            await samplers.finish(0, 1, 2)
            assert await step == [0, 1]
            buffer.limits.begin_step(1)
            buffer.fill()
            await settled()
            assert samplers.started == [*range(7)], "five at a time, of which one waits for the trainer"

    asyncio.run(scenario())


def test_samplers_work_while_the_trainer_trains():
    """Also if they are much faster: then one step waits for the trainer, and the next one is sampled."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 2)
        async with GroupBuffer(job) as buffer:
            buffer.fill()
            for _ in range(NUM_STEPS - 3):
                await settled()
                await samplers.finish(*(o for o, future in samplers.ended.items() if not future.done()))
                await take(buffer, job)
                await settled()
                assert sum(not future.done() for future in samplers.ended.values()) == PER_STEP
            assert buffer.limits._window == 2 * PER_STEP

    asyncio.run(scenario())


def test_groups_finish_in_any_order():
    """A step trains on the groups that have finished, in the order of their prompts."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 2)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            await samplers.finish(3, 1)
            assert await step == [1, 3]
            assert job.cursor["next_ordinal"] == 0 and job.cursor["finished"] == [1, 3]

    asyncio.run(scenario())


def test_the_oldest_groups_are_trained_first():
    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 2)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            await samplers.finish(3, 2, 1, 0)
            assert [await step, await take(buffer, job)] == [[0, 1], [2, 3]]

    asyncio.run(scenario())


def test_a_slow_group_is_waited_for_before_it_is_too_old():
    """Group 0 has version 0. With max_staleness 1 it must be trained in step 1 (version 1) at the latest."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 1)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            await samplers.finish(1, 2, 3)
            assert await step == [1, 2]
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            await samplers.finish(4, 5, versions=(1,))
            assert not step.done()
            await samplers.finish(0, versions=(0, 1))
            assert await step == [0, 3]

    asyncio.run(scenario())


def test_oversampling_drops_unfinished_groups_in_place_of_waiting():
    """With half a step more groups, one group may be dropped each step, and is counted."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 0, oversampling=0.5)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            assert samplers.started == [0, 1, 2]
            await samplers.finish(2)
            assert not step.done()
            await samplers.finish(1)
            assert await step == [1, 2]
            counts = {m.name: m.sum for m in buffer.metrics()}
            assert counts["rollout/groups_dropped"] == 1 and counts["rollout/groups_running"] == 0
            assert job.cursor["next_ordinal"] == 3 and job.cursor["finished"] == []

    asyncio.run(scenario())


def test_with_staleness_0_no_group_starts_while_the_trainer_trains():
    """Also not with oversampling, when the samplers had no room for all spare groups."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 0, oversampling=1.0, max_running_requests=2)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            for ordinal in (0, 1):
                await settled()
                assert samplers.started == [*range(ordinal + 1)]
                await samplers.finish(ordinal)
            assert await step == [0, 1]
            await settled()
            assert samplers.started == [0, 1]

    asyncio.run(scenario())


def test_every_sampler_gets_a_group_even_if_it_can_not_run_all_its_answers_at_once():
    async def scenario() -> None:
        samplers = Samplers()
        samplers.routes = Routes([0, 1, 2])
        job = job_of(samplers, 2, max_running_requests=1)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            assert samplers.started == [0, 1, 2]
            step.cancel()

    asyncio.run(scenario())


def test_an_error_of_a_group_is_raised():
    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 1)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            samplers.ended[3].set_exception(DataError("a prompt without messages"))
            with pytest.raises(DataError, match="a prompt without messages"):
                await step

    asyncio.run(scenario())


def test_the_first_error_of_several_groups_is_raised():
    """The later ones may follow from it, such as errors of other calls to a rank that was lost."""

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, 1)
        async with GroupBuffer(job) as buffer:
            step = asyncio.ensure_future(take(buffer, job))
            await settled()
            for ordinal, text in ((2, "the cause"), (0, "a consequence"), (3, "another one")):
                samplers.ended[ordinal].set_exception(DataError(text))
            with pytest.raises(DataError, match="the cause"):
                await step

    asyncio.run(scenario())


@pytest.mark.parametrize("oversampling", [0.0, 0.5])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_in_any_order_no_group_is_too_old_and_none_is_lost(seed, newest_first, staleness, oversampling):
    """Groups end in random order, some much later than others. Each prompt is trained once, at most max_staleness
    versions after its group was started; without over-sampling none is dropped."""
    random = np.random.default_rng(seed)

    async def scenario() -> None:
        samplers = Samplers()
        job = job_of(samplers, staleness, oversampling)
        seen, dropped = list[int](), 0

        async def end_groups() -> None:
            while True:
                running = [o for o, future in samplers.ended.items() if not future.done()]
                slow = {o for o in running if o % 5 == 0 and random.random() < 0.9}
                ready = [o for o in running if o not in slow] or running
                if ready and random.random() < 0.5:
                    samplers.ended[max(ready) if newest_first else int(random.choice(ready))].set_result([0])
                await asyncio.sleep(0)

        ends = asyncio.ensure_future(end_groups())
        async with GroupBuffer(job) as buffer:
            for _ in range(NUM_STEPS):
                groups = await asyncio.wait_for(buffer.take(), 5)
                ordinals = trained(groups)
                assert len(ordinals) == PER_STEP and ordinals == sorted(ordinals)
                seen += ordinals
                dropped += int(buffer.metrics()[2].sum)
                assert all(job.step - version_at_start[o] <= staleness for o in ordinals)
                job.cursor = buffer.cursor()
                job.step, job.trainer.version = job.step + 1, job.trainer.version + 1
        ends.cancel()
        assert len({*seen}) == len(seen)
        if not oversampling:
            assert sorted(seen) == [*range(NUM_STEPS * PER_STEP)] and dropped == 0

    version_at_start: dict[int, int] = {}
    started = GroupBuffer.fill

    def fill(self: GroupBuffer) -> None:
        started(self)
        for ordinal, version in self.limits.versions.items():
            version_at_start.setdefault(ordinal, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupBuffer, "fill", fill)
        asyncio.run(scenario())
