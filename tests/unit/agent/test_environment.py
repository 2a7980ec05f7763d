"""The agent `environment`: an episode of a user's class, and every way in which it ends."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import numpy as np
import pytest
from test_agents import ScriptedPolicy, context
from tiny_tokenizers import tiny_tokenizer
from waiting import wait_until

from meshrl.agent.attempt import attempt, check_attempts
from meshrl.agent.environment import EnvironmentAgent
from meshrl.agent.flatten import path_ids
from meshrl.agent.resolve import resolve_agent
from meshrl.config.agent import AgentConfig
from meshrl.core.errors import AgentError, ConfigError, Failure
from meshrl.core.types import Prompt, Trajectory

USER = {"role": "user", "content": "ab?"}
TOKENIZER = tiny_tokenizer()
PROMPT = Prompt(id="p", ordinal=5, messages=[USER], answer="4", env="sums", meta={"a": 1})
TEXTS = ("<think>1</think>12", "ab", "3")


class Adder:
    """Episodes of three turns; the reward is the turn's number. fault: what goes wrong, and in which method."""

    def __init__(self, log: list[Any], fault: Any = None, place: str = ""):
        self.log, self.fault, self.place, self.num_steps = log, fault, place, 0
        self.does("constructor")

    def does(self, place: str) -> Any:
        self.log.append(place)
        if place == self.place:
            if isinstance(self.fault, BaseException):
                raise self.fault
            return self.fault() if callable(self.fault) else self.fault

    def reset(self, *, seed: int, options: dict[str, Any]) -> Any:
        self.log.append((seed, options))
        return self.does("reset") or ("begin", {"unused": 1})

    def step(self, action: str) -> Any:
        self.log.append(action)
        self.num_steps += 1
        reward = np.float32(self.num_steps)
        return self.does("step") or (f"n{self.num_steps}", reward, self.num_steps == 3, False, {"n": self.num_steps})

    def close(self) -> Any:
        return self.does("close")


class AsyncAdder(Adder):
    async def reset(self, *, seed: int, options: dict[str, Any]) -> Any:
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self) -> Any:
        return super().close()


def policy(*texts: str) -> ScriptedPolicy:
    return ScriptedPolicy(TOKENIZER, *(texts or TEXTS))


def play(
    kind: type = Adder, prompt: Prompt = PROMPT, *, index: int = 0, settings: Any = None, **args: Any
) -> tuple[Trajectory, list[Any], ScriptedPolicy]:
    """The trajectory, the log of the environment, and the sampler."""
    log, sampler = list[Any](), policy()
    agent = EnvironmentAgent(kind, {"log": log, **(settings or {})}, **args)
    before = threading.active_count()
    trajectory = asyncio.run(attempt(agent, prompt, index, sampler.generate, context(TOKENIZER), "environment"))
    assert "timeout_s" in args or wait_until(lambda: threading.active_count() <= before)
    return trajectory, log, sampler


@pytest.mark.parametrize("kind", [Adder, AsyncAdder])
def test_an_episode_is_a_conversation_of_sampled_tokens_with_a_reward_for_each_turn(kind: type):
    trajectory, log, sampler = play(kind)
    assert (trajectory.status, [turn.parent for turn in trajectory.turns]) == ("done", [-1, 0, 1])
    assert [turn.reward for turn in trajectory.turns] == [1.0, 2.0, 3.0]
    assert trajectory.prompt.messages == [{"role": "user", "content": "ab?\n\nbegin"}]
    assert [turn.messages for turn in trajectory.turns] == [
        [{"role": "assistant", "content": TEXTS[0], "info": {"n": 1}}],
        [{"role": "user", "content": "n1"}, {"role": "assistant", "content": TEXTS[1], "info": {"n": 2}}],
        [{"role": "user", "content": "n2"}, {"role": "assistant", "content": TEXTS[2], "info": {"n": 3}}],
    ]
    for i, request in enumerate(sampler.requests[1:]):  # each context begins with the ids as they were sampled
        so_far = path_ids(trajectory.turns, i)
        np.testing.assert_array_equal(request.context_ids[: len(so_far)], so_far)
    assert [entry for entry in log if isinstance(entry, str)] == [
        *("constructor", "reset", "12", "step", "ab", "step", "3", "step", "close")
    ]
    (options,) = [entry[1] for entry in log if isinstance(entry, tuple)]
    assert options == {"id": "p", "env": "sums", "meta": {"a": 1}, "messages": [USER], "answer": "4"}


def test_the_attempts_of_a_group_have_one_seed_and_other_rows_another():
    def seed(prompt: Prompt, index: int) -> int:
        return next(entry[0] for entry in play(prompt=prompt, index=index)[1] if isinstance(entry, tuple))

    other = Prompt(id="p", ordinal=6, messages=[USER])
    assert seed(PROMPT, 0) == seed(PROMPT, 1) != seed(other, 0)


@pytest.mark.parametrize(
    ("settings", "args", "num_turns"),
    [({}, {"max_turns": 2}, 2), ({"place": "step", "fault": ("", 0.5, False, True, {})}, {}, 1)],
)
def test_an_episode_that_is_cut_off_is_truncated(settings: Any, args: Any, num_turns: int):
    trajectory, log, _ = play(settings=settings, **args)
    assert (trajectory.status, len(trajectory.turns), trajectory.failure) == ("truncated", num_turns, None)
    assert trajectory.turns[-1].reward is not None and log[-1] == "close"


def test_an_answer_that_is_cut_off_is_no_action():
    log, sampler = list[Any](), policy("ab", "1")
    sampler.stop_reason = "length"
    agent = EnvironmentAgent(Adder, {"log": log})
    trajectory = asyncio.run(agent.run(PROMPT, 0, sampler.generate, context(TOKENIZER)))
    assert (trajectory.status, [turn.reward for turn in trajectory.turns]) == ("truncated", [None])
    assert "step" not in log and log[-1] == "close"


STEP = "step of the environment returned"
FAULTS: list[tuple[str, Any, str]] = [  # place, fault, message
    ("constructor", KeyError("no map"), "KeyError: 'no map' at .*test_environment.py"),
    ("reset", OSError("no server"), "OSError: no server at .*test_environment.py"),
    ("step", ValueError("bad move"), "ValueError: bad move at .*test_environment.py"),
    ("step", SystemExit(3), "SystemExit: 3"),
    ("step", StopIteration(), "StopIteration"),
    ("step", TimeoutError("its own"), "TimeoutError: its own"),
    ("step", asyncio.CancelledError(), "CancelledError"),
    ("close", ValueError("not closed"), "ValueError: not closed"),
    ("reset", "begin", r"reset of the environment returned 'begin'; it must return \(observation, info\)"),
    ("reset", (3, {}), "an observation is 3; it must be a text"),
    ("step", ("a", 1.0, True, {}), rf"{STEP} \('a', 1.0, True, {{}}\); it must return"),
    ("step", ("a", "1", False, False, {}), "step returned '1'; it must return a number"),
    ("step", ("a", float("nan"), False, False, {}), "step returned nan; it must return a number"),
    ("step", (None, 1.0, False, False, {}), "an observation is None; it must be a text"),
    ("step", ([{"role": "tool"}], 1.0, False, False, {}), "an observation is {'role': 'tool'}"),
    ("step", ("x" * (1 << 21), 1.0, False, False, {}), "of at most 1048576 characters"),
    ("step", ("a", 1.0, False, False, {"x": {1}}), "TypeError: .*not JSON serializable"),
]


@pytest.mark.parametrize("kind", [Adder, AsyncAdder])
@pytest.mark.parametrize(("place", "fault", "message"), FAULTS)
def test_a_failure_of_an_environment_fails_its_attempt_and_closes_it(kind: type, place: str, fault: Any, message: str):
    trajectory, log, _ = play(kind, settings={"place": place, "fault": fault})
    failure = trajectory.failure
    assert failure is not None and (trajectory.status, trajectory.turns, failure.kind) == ("failed", [], "crash")
    assert re.search(message, failure.message), failure
    assert log[-1] == ("constructor" if place == "constructor" else "close")
    with pytest.raises(AgentError, match="agent environment failed in 1 of 1 attempts"):
        check_attempts([trajectory], "environment", 0.2)


def test_a_call_that_does_not_return_fails_its_attempt_and_is_followed_by_close():
    goes_on = threading.Event()
    settings = {"place": "step", "fault": lambda: goes_on.wait(20) and None}
    trajectory, log, _ = play(settings=settings, timeout_s=0.2)
    assert trajectory.failure == Failure(kind="timeout", message="step of the environment has not returned in 0.2 s")
    assert log[-1] == "step"
    goes_on.set()
    assert wait_until(lambda: log[-1] == "close")


@pytest.mark.parametrize("place", ["constructor", "step"])
def test_an_attempt_that_is_cancelled_during_a_call_is_closed_after_it(place: str):
    """The end of a run cancels attempts."""
    entered, goes_on, log = threading.Event(), threading.Event(), list[Any]()

    def waits() -> None:
        entered.set()
        goes_on.wait(20)

    async def run() -> None:
        agent = EnvironmentAgent(Adder, {"log": log, "place": place, "fault": waits})
        task = asyncio.create_task(agent.run(PROMPT, 0, policy().generate, context(TOKENIZER)))
        assert await asyncio.to_thread(entered.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        assert "close" not in log
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log[-1] == "close"

    asyncio.run(run())


def test_a_blocking_environment_does_not_block_the_event_loop():
    """Two episodes wait for each other in their steps."""
    barrier, log = threading.Barrier(2), list[Any]()
    agent = EnvironmentAgent(Adder, {"log": log, "place": "step", "fault": lambda: barrier.wait(20) and None})

    async def both() -> list[Trajectory]:
        return await asyncio.gather(*(agent.run(PROMPT, i, policy().generate, context(TOKENIZER)) for i in range(2)))

    assert [len(trajectory.turns) for trajectory in asyncio.run(both())] == [3, 3]


class NoStep:
    def reset(self, *, seed: int, options: Any) -> None: ...


class OldReset(NoStep):
    def reset(self, seed: int) -> None: ...  # type: ignore[override]

    def step(self, action: str) -> None: ...


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"environment": "test_environment:NoStep"}, "has no attribute 'step'. It must be a class"),
        ({"environment": "test_environment:OldReset"}, r"unexpected keyword argument 'options'.*reset\(self, \*, seed"),
        ({"environment": "test_environment:Adder", "settings": {"lag": 1}}, "missing a required argument: 'log'"),
        ({"environment": "test_environment:Ader"}, "did you mean 'Adder'"),
        ({"environment": "test_environment:USER"}, "is not a callable object"),
        ({"environment": "test_environment:Adder", "max_turns": 0}, "max_turns is 0; it must be an integer"),
        ({"environment": "test_environment:Adder", "timeout_s": 0}, "timeout_s is 0; it must be a number above 0"),
        ({}, "missing a required argument: 'environment'"),
    ],
)
def test_an_environment_that_can_not_work_is_refused_at_the_start(args: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected):
        resolve_agent(AgentConfig(kind="environment", args=args))
