"""The programs of endpoint agents: how they are called, and every way in which they end."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

import endpoint_programs
import numpy as np
import psutil
import pytest
from endpoint_clients import TextPolicy, endpoint_context
from tiny_tokenizers import SHOWS_TOOLS, tiny_tokenizer

from meshrl.agent.attempt import attempt, check_attempts
from meshrl.agent.endpoint.agent import EndpointAgent
from meshrl.agent.loop import RunOfAgent, SingleTurn
from meshrl.agent.resolve import resolve_agent
from meshrl.config.agent import AgentConfig
from meshrl.core.errors import AgentError, ConfigError, RankFailure
from meshrl.core.types import Prompt

COMMAND = [sys.executable, "-m", "endpoint_programs"]


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(endpoint_programs.__file__).parent))


def prompts(num, **meta):
    return [
        Prompt(id=f"p{i}", ordinal=i, messages=[{"role": "user", "content": f"ab{i}?"}], meta=meta) for i in range(num)
    ]


def attempts(agent, given, generate=None, delay_s=0.0):
    """One attempt at each prompt, each so much later than the one before it."""
    tokenizer, notes = tiny_tokenizer(SHOWS_TOOLS), []
    policy = TextPolicy(tokenizer, lambda request: "ab12")

    async def run():
        ctxs = [endpoint_context(tokenizer, group_id=f"{prompt.id}@{prompt.ordinal}") for prompt in given]
        if not isinstance(agent, EndpointAgent):
            return [await agent.run(p, 0, policy.generate, ctx) for p, ctx in zip(given, ctxs)]
        async with agent.opened(RunOfAgent(folder=Path(), note=notes.append)):

            async def one(i):
                await asyncio.sleep(i * delay_s)
                return await attempt(agent, given[i], 0, generate or policy.generate, ctxs[i], "mine")

            return await asyncio.gather(*map(one, range(len(given))))

    trajectories = asyncio.run(run())
    assert not getattr(agent, "_open", None)
    return trajectories


@pytest.mark.parametrize(
    "args",
    [
        {"function": "endpoint_programs:chat"},
        {"function": "endpoint_programs:streamed"},
        {"function": "endpoint_programs:blocking"},
        {"command": COMMAND},
        {"function": endpoint_programs.chat},
    ],
)
def test_a_program_samples_what_single_turn_samples(args):
    given = prompts(2)
    found, expected = attempts(EndpointAgent(**args), given), attempts(SingleTurn(), given)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.failure is None and len(ours.turns) == 1
        np.testing.assert_array_equal(ours.turns[0].context_ids, theirs.turns[0].context_ids)
        assert (ours.turns[0].seed, ours.turns[0].messages) == (theirs.turns[0].seed, theirs.turns[0].messages)


def children():
    return {p.pid for p in psutil.Process().children(recursive=True)}


ENDINGS = {
    "raises": ("crash", "KeyError: 'no such room' at "),
    "exits": ("crash", "its worker process ended with exit code 3"),
    "hangs": ("timeout", "has not ended within agent.args.timeout_s = 4 s"),
    "no_call": ("crash", "ended without a request"),
    "bad_reward": ("crash", "returned 'much'; it must return a number"),
    "well": (None, ""),
}


def test_every_end_of_a_program_is_typed_and_leaves_no_process():
    """Thirty ends, each of a program that has started a process of its own."""
    before = children()
    for kind, (expected, text) in ENDINGS.items():  # apart, since an exit ends the attempts in the same worker, too
        agent = EndpointAgent(function="endpoint_programs:ends_badly", timeout_s=4 if kind == "hangs" else 60)
        ended = attempts(agent, prompts(5, ending=kind))
        for t in ended:
            assert (t.failure and t.failure.kind) == expected, t.failure
            if expected:
                assert text in t.failure.message and t.status == "failed" and t.turns == []
        if expected:
            with pytest.raises(AgentError, match="failed in 5 of 5 attempts"):
                check_attempts(ended, "mine", 0.2)
    _wait_for_end(before)


def _wait_for_end(before):
    until = time.monotonic() + 20
    while children() - before and time.monotonic() < until:
        time.sleep(0.1)
    assert children() <= before


def test_sys_exit_in_an_async_function_fails_the_attempt_with_its_place():
    async def leaves(base_url, api_key, messages):
        sys.exit(2)

    (t,) = attempts(EndpointAgent(function=leaves), prompts(1))
    assert t.failure.kind == "crash" and "SystemExit: 2 at " in t.failure.message and __file__ in t.failure.message


def test_an_attempt_that_hangs_fails_alone():
    """The other one runs in the same worker, and ends later."""
    given = [*prompts(1, ending="hangs"), prompts(2, ending="slow")[1]]
    agent = EndpointAgent(function="endpoint_programs:ends_badly", timeout_s=4)
    kinds = [t.failure and t.failure.kind for t in attempts(agent, given, delay_s=2.0)]
    assert kinds == ["timeout", None]


@pytest.mark.parametrize(
    "code,text",
    [
        ("import sys; sys.exit('broken')", "the command ended with exit code 1; it printed: broken"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("", "without a request"),
        ("import os; open(os.environ['MESHRL_RESULT'], 'w').write('much')", "wrote a result that is not"),
        ("import os; os.mkdir(os.environ['MESHRL_RESULT'])", "it is not a regular file"),
        ("import os; os.mkfifo(os.environ['MESHRL_RESULT'])", "it is not a regular file"),
    ],
)
def test_a_command_that_ends_badly(code, text):
    before = children()
    (t,) = attempts(EndpointAgent(command=[sys.executable, "-c", code]), prompts(1))
    assert t.failure.kind == "crash" and text in t.failure.message
    _wait_for_end(before)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e300, True])
def test_a_reward_that_is_no_number_fails_the_attempt_alone(reward):
    async def returns(base_url, api_key, messages):
        await endpoint_programs.chat(base_url, api_key, messages)
        return reward

    (t,) = attempts(EndpointAgent(function=returns), prompts(1))
    assert t.failure.kind == "crash" and "it must return a number" in t.failure.message


def test_a_reward_of_the_program_is_that_of_the_last_turn():
    async def two_turns(base_url, api_key, messages):
        await endpoint_programs.chat(base_url, api_key, messages)
        await endpoint_programs.chat(base_url, api_key, [*messages, *messages])
        return 0.25

    (t,) = attempts(EndpointAgent(function=two_turns), prompts(1))
    assert [turn.reward for turn in t.turns] == [None, 0.25]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ({"reward": 0.25, "metrics": {"steps": 3, "left_out": None}}, (0.25, {"steps": 3})),
        ({"metrics": {"steps": 3.5}}, (None, {"steps": 3.5})),
        ({"reward": 0.25}, (0.25, {})),
        ({"reward": 0.25, "metrics": {"steps": "3"}}, "metric 'steps', returned '3'; it must return a number"),
        ({"reward": 0.25, "metrics": {"steps": float("nan")}}, "metric 'steps', returned nan"),
        ({"reward": 0.25, "metrics": [3]}, "the metrics [3]; they must be numbers by name"),
        ({"rewards": 0.25}, "returned {'rewards': 0.25}; it must return a number"),
    ],
)
def test_metrics_of_a_program_are_those_of_the_trajectory(returned, expected):
    async def returns(base_url, api_key, messages):
        await endpoint_programs.chat(base_url, api_key, messages)
        return returned

    (t,) = attempts(EndpointAgent(function=returns), prompts(1))
    if isinstance(expected, str):
        assert t.failure.kind == "crash" and expected in t.failure.message
    else:
        assert (t.turns[0].reward, t.metrics) == expected


def test_a_command_writes_its_metrics_next_to_its_reward():
    code = "import json, os; from endpoint_programs import main; main(); open(os.environ['MESHRL_RESULT'], 'w').write("
    program = [sys.executable, "-c", code + "json.dumps({'reward': 0.5, 'metrics': {'steps': 3}}))"]
    (t,) = attempts(EndpointAgent(command=program), prompts(1))
    assert t.failure is None and (t.turns[0].reward, t.metrics) == (0.5, {"steps": 3})


@pytest.mark.parametrize("limit", ["max_turns", "context"])
def test_a_program_that_ends_at_a_limit_leaves_a_truncated_trajectory(limit):
    async def goes_on(base_url, api_key, messages):
        for i in range(9):
            messages = [*messages, {"role": "user", "content": f"{i}" * 900}]
            await endpoint_programs.chat(base_url, api_key, messages)

    (t,) = attempts(EndpointAgent(function=goes_on, max_turns=2 if limit == "max_turns" else None), prompts(1))
    assert (t.status, t.failure) == ("truncated", None)
    assert len(t.turns) == (2 if limit == "max_turns" else 4)


def test_an_exception_after_a_later_turn_is_a_crash():
    async def shortens_and_breaks(base_url, api_key, messages):
        await endpoint_programs.chat(base_url, api_key, messages)
        with pytest.raises(endpoint_programs.httpx2.HTTPStatusError, match="400"):
            await endpoint_programs.chat(base_url, api_key, [{"role": "user", "content": "1" * 9000}])
        await endpoint_programs.chat(base_url, api_key, [{"role": "user", "content": "a summary"}])
        raise KeyError("no such room")

    (t,) = attempts(EndpointAgent(function=shortens_and_breaks), prompts(1))
    assert t.failure.kind == "crash" and "no such room" in t.failure.message


def test_a_key_ends_with_its_attempt():
    keys = []

    async def remembers(base_url, api_key, messages):
        keys.append((base_url, api_key))
        await endpoint_programs.chat(base_url, api_key, messages)
        for url, key in keys[:-1]:
            with pytest.raises(endpoint_programs.httpx2.HTTPStatusError, match="401"):
                await endpoint_programs.chat(url, key, messages)

    agent = EndpointAgent(function=remembers)

    async def in_turn():
        tokenizer = tiny_tokenizer(SHOWS_TOOLS)
        policy = TextPolicy(tokenizer, lambda request: "ab")
        async with agent.opened(RunOfAgent(folder=Path(), note=print)):
            for _ in range(2):
                t = await attempt(agent, prompts(1)[0], 0, policy.generate, endpoint_context(tokenizer), "mine")
                assert t.failure is None

    asyncio.run(in_turn())
    assert len({key for _, key in keys}) == 2


def test_a_failure_of_the_engine_ends_the_run_and_not_only_the_attempt():
    async def fails(request):
        raise RankFailure(1, "rollout", "it is gone")

    async def asks_again(base_url, api_key, messages):
        while True:
            await asyncio.sleep(0.01)
            with suppress(endpoint_programs.httpx2.HTTPStatusError):
                await endpoint_programs.chat(base_url, api_key, messages)

    with pytest.raises(RankFailure, match="it is gone"):
        attempts(EndpointAgent(function=asks_again), prompts(1), fails)


def strange(base_url, api_key, temperature):
    pass


@pytest.mark.parametrize(
    "args,text",
    [
        ({}, "give either function"),
        ({"function": "a:b", "command": ["c"]}, "give either function"),
        ({"function": "endpoint_programs:nothing"}, "has no 'nothing'"),
        ({"function": "endpoint_programs:ENVIRONMENT"}, "it must be a function"),
        ({"function": strange}, "has the parameters temperature"),
        ({"function": lambda base_url: None}, "at the top level of a module"),
        ({"command": "python agent.py"}, "must be a list of texts"),
        ({"command": []}, "must be a list of texts"),
        ({"command": ["a"], "timeout_s": 0}, "timeout_s is 0"),
        ({"command": ["a"], "max_turns": 0}, "max_turns is 0"),
        ({"command": ["a"], "workers": 3}, "don't fit agent.kind 'endpoint'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_run(args, text):
    with pytest.raises(ConfigError, match=text):
        resolve_agent(AgentConfig(kind="endpoint", args=args))
