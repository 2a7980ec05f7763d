"""The controller's waits for agents and graders have a deadline."""

from __future__ import annotations

import asyncio
import time

import pytest
from tiny_run import steps_of, train, write_run

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.core.errors import DeadlineError, MeshrlError
from meshrl.loops import collect
from meshrl.loops.collect import gather_with_deadline
from meshrl.rollout.embedded.engine import EmbeddedEngine

CLUSTER = ClusterConfig(deadlines=Deadlines(rollout=0.2))


@pytest.fixture(autouse=True)
def no_slack(monkeypatch):
    monkeypatch.setattr(collect, "_SLACK_S", 0.0)


async def ask_a_tool():
    await asyncio.Event().wait()


async def agent(value, ended):
    try:
        if value is None:
            await ask_a_tool()
        await asyncio.sleep(0)
        return value
    finally:
        ended.append(value)


def test_a_job_that_its_own_code_cancels_is_an_error():
    """A CancelledError would look as if the run had been stopped from outside."""

    async def cancelled_by_a_library():
        inner = asyncio.ensure_future(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner

    with pytest.raises(MeshrlError, match=r"phase 'rollout': a task was cancelled by the code that it runs"):
        asyncio.run(gather_with_deadline(CLUSTER, "rollout", [cancelled_by_a_library()]))


def test_a_cancellation_from_outside_passes_through():
    async def run():
        waiting = asyncio.ensure_future(gather_with_deadline(CLUSTER, "rollout", [asyncio.Event().wait()]))
        await asyncio.sleep(0)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_results_come_in_order():
    async def later(seconds, value):
        await asyncio.sleep(seconds)
        return value

    jobs = [later(0.03, "a"), later(0.0, "b"), later(0.01, "c")]
    assert asyncio.run(gather_with_deadline(CLUSTER, "train", jobs)) == ["a", "b", "c"]
    assert asyncio.run(gather_with_deadline(CLUSTER, "train", [])) == []


def test_an_agent_that_waits_for_ever_ends_the_phase_and_its_stack_is_reported():
    ended = []
    with pytest.raises(DeadlineError) as error:
        asyncio.run(gather_with_deadline(CLUSTER, "rollout", [agent(1, ended), agent(None, ended), agent(None, ended)]))
    text = str(error.value)
    assert text.startswith("phase 'rollout': none of 2 waiting tasks ended within 0.2 s (cluster.deadlines.rollout")
    assert text.count("in ask_a_tool") == 2 and "await asyncio.Event().wait()" in text
    assert ended == [1, None, None], "they are cancelled"


def test_a_phase_may_take_long_while_something_ends():
    """Six tasks in sequence, each about a third of the deadline: together longer than the deadline."""

    async def queue():
        lock = asyncio.Lock()

        async def one(i):
            async with lock:
                await asyncio.sleep(0.07)
                return i

        return await gather_with_deadline(CLUSTER, "rollout", [one(i) for i in range(6)])

    assert asyncio.run(queue()) == list(range(6))


def test_the_first_exception_ends_all_and_so_does_a_cancellation():
    async def fail():
        await asyncio.sleep(0)
        raise KeyError("row 7")

    ended = []
    with pytest.raises(KeyError, match="row 7"):
        asyncio.run(gather_with_deadline(CLUSTER, "train", [agent(None, ended), fail()]))
    assert ended == [None]

    async def interrupted():
        task = asyncio.create_task(gather_with_deadline(CLUSTER, "train", [agent(None, ended)]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return list(ended)

    assert asyncio.run(interrupted()) == [None, None]


@pytest.mark.parametrize("num_slow_steps", [8, 3])
def test_a_phase_may_take_long_while_a_sampler_computes_tokens(num_slow_steps, tmp_path, monkeypatch):
    """All answers end after eight steps, which take three times the deadline. A sampler that stands still after three
    steps ends the run."""
    step, num_steps = EmbeddedEngine.step, 0

    def slow(engine):
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.15 if num_steps <= num_slow_steps else 0.001)
        return step(engine) if num_steps <= num_slow_steps else []

    monkeypatch.setattr(EmbeddedEngine, "step", slow)
    overrides = "cluster.executor=inline", "cluster.deadlines.rollout=0.4"
    overrides += "loop.num_steps=1", "loop.prompts_per_step=1", "loop.samples_per_prompt=2"
    if num_slow_steps == 8:
        assert len(steps_of(train(write_run(tmp_path), "slow", *overrides))) == 1
    else:
        with pytest.raises(DeadlineError, match="phase 'rollout': none of 1 waiting tasks ended"):
            train(write_run(tmp_path), "stands_still", *overrides)
