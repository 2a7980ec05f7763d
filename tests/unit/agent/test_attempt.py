"""An exception of an agent's own code fails one sample; errors of the engine and of meshrl end the run."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from scripted_agent import ScriptedAgent, ScriptedEngine, generate_to_the_end, scripted_context, scripted_prompt

from meshrl.agent.attempt import attempt, check_attempts
from meshrl.agent.flatten import TurnError
from meshrl.agent.loop import start_trajectory, take_turn
from meshrl.core.errors import AgentError, DataError, Failure, MeshrlError, RankFailure, RequestError
from meshrl.core.types import Trajectory

LOST = RankFailure(1, "rollout", "its process was killed by SIGKILL")


class Agent(ScriptedAgent):
    """Takes the turns of its base class, then runs this code."""

    def __init__(self, then):
        super().__init__()
        self.then = then

    async def run(self, prompt, index, generate, ctx):
        return self.then(await super().run(prompt, index, generate, ctx))


def raises(error):
    def then(trajectory):
        raise error

    return then


def run(agent, error=None):
    """error: of the engine, instead of an answer."""
    engine = ScriptedEngine()

    async def generate(request):
        if error is not None:
            raise error
        return await generate_to_the_end(engine, request)

    ctx = scripted_context("p-0@7", purpose="eval")
    return asyncio.run(attempt(agent, scripted_prompt(0), 2, generate, ctx, "mine:Agent"))


def test_an_agents_trajectory_is_returned_as_it_is():
    made: list[Trajectory] = []
    agent = Agent(lambda trajectory: made.append(trajectory) or trajectory)
    assert run(agent) is made[0] and made[0].failure is None and len(made[0].turns) == 4


def test_an_exception_of_an_agent_is_a_typed_failure_of_its_sample():
    t = run(Agent(raises(KeyError("no such\nroom"))))
    assert (t.status, t.turns, t.reward, t.id, t.purpose) == ("failed", [], None, "p-0@7/2", "eval")
    assert t.failure.kind == "crash"
    assert t.failure.message.startswith(r"KeyError: 'no such\nroom' at ") and "test_attempt.py:" in t.failure.message


def test_the_failure_names_the_users_line_and_not_that_of_a_library():
    t = run(Agent(lambda trajectory: json.loads("no JSON")))
    assert t.failure.message.startswith("JSONDecodeError: ") and "test_attempt.py:" in t.failure.message


@pytest.mark.parametrize("error", [DataError("no messages"), MeshrlError("a bug")])
def test_errors_of_meshrl_end_the_run(error):
    with pytest.raises(type(error)) as raised:
        run(Agent(raises(error)))
    assert raised.value is error


def test_a_refused_request_that_the_agent_does_not_handle_fails_its_sample():
    class Direct(ScriptedAgent):
        async def run(self, prompt, index, generate, ctx):
            await generate(None)

    t = run(Direct(), RequestError("too long"))
    assert (t.status, t.failure) == ("failed", Failure(kind="engine", message="too long"))


@pytest.mark.parametrize("error", [LOST, RuntimeError("a bug of the engine")])
@pytest.mark.parametrize("handling", ["none", "wraps", "hides"])
def test_errors_of_the_engine_end_the_run_whatever_the_agent_does_with_them(error, handling):
    class Handles(ScriptedAgent):
        async def run(self, prompt, index, generate, ctx):
            try:
                await super().run(prompt, index, generate, ctx)
            except Exception as cause:
                if handling == "none":
                    raise
                if handling == "wraps":
                    raise ValueError("it failed") from cause
            return Trajectory(prompt=prompt, group_id=ctx.group_id, index=index)

    with pytest.raises(type(error)) as raised:
        run(Handles(), error)
    assert raised.value is error


def test_what_is_no_trajectory_is_refused_with_the_name_of_the_agent():
    with pytest.raises(MeshrlError, match="agent mine:Agent returned None; it must return a Trajectory"):
        run(Agent(lambda trajectory: None))


@pytest.mark.parametrize("value", ["1", 2e12, float("nan")])
def test_an_invalid_reward_of_a_turn_is_refused_before_it_is_added(value):
    def then(trajectory):
        trajectory.turns[1] = dataclasses.replace(trajectory.turns[1], reward=value)
        return trajectory

    with pytest.raises(TurnError, match=r"turn 1: reward is .*it must be a finite number"):
        run(Agent(then))


def crashed(index, kind="crash"):
    failure = Failure(kind=kind, message=f"ValueError: {index} at my.py:3")
    return Trajectory(prompt=scripted_prompt(0), group_id="g", index=index, status="failed", failure=failure)


def test_a_share_of_crashes_above_the_limit_ends_the_run_with_examples():
    done = Trajectory(prompt=scripted_prompt(0), group_id="g", index=9)
    check_attempts([crashed(0), done, done, done], "mine:Agent", 0.25)
    with pytest.raises(AgentError) as ended:
        check_attempts([crashed(0), crashed(1), done, done], "mine:Agent", 0.25)
    text = str(ended.value)
    assert "agent mine:Agent failed in 2 of 4 attempts" in text
    assert "more than agent.max_failure_fraction = 0.25 allows" in text
    assert "\n  row p-0, answer 1: ValueError: 1 at my.py:3" in text


def test_other_failures_do_not_count_as_crashes():
    check_attempts([crashed(0, "engine"), crashed(1, "agent")], "mine:Agent", 0.0)
    check_attempts([], "mine:Agent", 0.0)


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError("a task that the agent waits for")])
def test_an_exit_and_an_inner_cancellation_of_an_agent_fail_its_sample(error):
    t = run(Agent(raises(error)))
    assert (t.status, t.failure.kind) == ("failed", "crash")
    assert t.failure.message.startswith(f"{type(error).__name__}: {error} at ")


def test_an_exception_without_a_text_fails_its_sample():
    class Silent(Exception):
        def __str__(self):
            raise ValueError("no text")

    assert run(Agent(raises(Silent()))).failure.message.startswith("Silent (its __str__ raised ValueError) at ")


def test_a_cancelled_attempt_ends():
    class Waits(ScriptedAgent):
        async def run(self, prompt, index, generate, ctx):
            await asyncio.sleep(60)

    async def cancelled():
        task = asyncio.create_task(
            attempt(Waits(), scripted_prompt(0), 0, ScriptedEngine().generate, scripted_context("p-0@7"), "mine:Agent")
        )
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(cancelled())


def test_a_cancellation_from_the_engine_is_no_fault_of_the_agent():
    with pytest.raises(asyncio.CancelledError):
        run(Agent(lambda trajectory: trajectory), asyncio.CancelledError())


def test_an_agent_may_limit_the_time_of_a_request():
    class Impatient(ScriptedAgent):
        async def run(self, prompt, index, generate, ctx):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(generate(None), 0.01)
            return await super().run(prompt, index, answers, ctx)

    async def answers(request):
        return await generate_to_the_end(engine, request)

    async def never(request):
        await asyncio.Event().wait()

    engine, ctx = ScriptedEngine(), scripted_context("p-0@7")
    t = asyncio.run(attempt(Impatient(), scripted_prompt(0), 2, never, ctx, "mine:Agent"))
    assert (t.failure, len(t.turns)) == (None, 4)


@pytest.mark.parametrize("change", [{"index": 0}, {"group_id": "mine"}, {"purpose": "train"}])
def test_a_trajectory_of_another_attempt_is_refused(change):
    def then(trajectory):
        for name, value in change.items():
            setattr(trajectory, name, value)
        return trajectory

    with pytest.raises(MeshrlError, match=r"mine:Agent returned the trajectory .* as attempt 'p-0@7/2'"):
        run(Agent(then))


class AtOnce(ScriptedAgent):
    """Takes these turns after a first one, at the same time. They end in the order of `delays`."""

    def __init__(self, endings, delays):
        super().__init__()
        self.endings, self.delays = endings, dict(zip(endings, delays))

    async def run(self, prompt, index, generate, ctx):
        trajectory = start_trajectory(prompt, index, ctx)

        async def slow(request):
            for _ in range(self.delays.get(int(request.context_ids[-1]), 0)):
                await asyncio.sleep(0)
            return await generate(request)

        first = await take_turn(trajectory, np.array([9, 9], np.int32), slow, ctx)
        base = np.concatenate([[9, 9], first.output_ids]).astype(np.int32)
        contexts = [np.append(base, np.int32(end)) for end in self.endings]
        await asyncio.gather(*(take_turn(trajectory, context, slow, ctx) for context in contexts))
        return trajectory


def test_turns_at_once_have_ids_of_their_own_and_seeds_of_their_contexts():
    seen = []
    for delays in ((0, 3, 6, 9), (9, 6, 3, 0)):
        engine = ScriptedEngine()

        async def generate(request, engine=engine):
            return await generate_to_the_end(engine, request)

        agent = AtOnce((11, 12, 13, 13), delays)
        t = asyncio.run(attempt(agent, scripted_prompt(0), 2, generate, scripted_context("p-0@7"), "mine:Agent"))
        assert t.failure is None and [turn.parent for turn in t.turns] == [-1, 0, 0, 0, 0]
        assert len({r.id for r in engine.requests}) == 5 and len({r.seed for r in engine.requests}) == 5
        seen.append(sorted((tuple(turn.context_ids), tuple(turn.output_ids)) for turn in t.turns))
    assert seen[0] == seen[1]
