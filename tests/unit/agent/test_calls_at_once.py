"""The calls of one answer: at once, in order, each with a time limit and a bounded result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from test_agents import ScriptedPolicy, context, run
from tiny_tokenizers import tiny_tokenizer

from meshrl.agent.flatten import flatten, path_ids
from meshrl.agent.loop import MultiTurn
from meshrl.agent.parsing import ToolCall
from meshrl.agent.tools import MAX_ANSWER_CHARS, MAX_AT_ONCE, MAX_RESULT_CHARS, Tool, call_tools
from meshrl.core.errors import ConfigError


def tool(function: Callable[..., Any], name: str = "t") -> Tool:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    return Tool(name=name, description="", parameters=schema, function=function)


def answers(function: Callable[..., Any], count: int = 1, timeout_s: float = 30.0) -> list[str]:
    calls = [ToolCall(str(n), "t", f'{{"n": {n}}}') for n in range(count)]
    return asyncio.run(call_tools({"t": tool(function)}, calls, timeout_s))


def test_calls_run_at_once_and_are_answered_in_their_order():
    """Each waits for the others; the last one returns first."""
    together = threading.Barrier(3, timeout=30)
    returned = [threading.Event() for _ in range(4)]
    returned[3].set()

    def wait(n: int) -> int:
        together.wait()
        assert returned[n + 1].wait(30)
        returned[n].set()
        return n

    assert answers(wait, 3) == ["0", "1", "2"]


def test_the_time_of_the_calls_is_that_of_their_turn():
    async def wait(n: int) -> str:
        await asyncio.sleep(0.03)
        return "7"

    tokenizer = tiny_tokenizer()
    call = '<tool_call>{"name": "t", "arguments": {"n": 1}}</tool_call>'
    t = run(MultiTurn(tools=[tool(wait)]), ScriptedPolicy(tokenizer, call, "ab").generate, context(tokenizer))
    first, last = (turn.times.tool_s for turn in t.turns)
    assert 0.03 <= first < 5 and last == 0


def test_a_degenerate_answer_does_not_run_all_its_calls_at_once():
    running, most = 0, 0

    async def count(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return n

    assert answers(count, 100) == [str(n) for n in range(100)]
    assert most == MAX_AT_ONCE


@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_that_never_returns_is_an_error_and_the_others_are_answered(is_async: bool):
    release = threading.Event()

    def hang(n: int) -> int:
        return release.wait(30) if n == 1 else n

    async def hang_in_the_loop(n: int) -> int:
        return await asyncio.sleep(30, 7) if n == 1 else n

    got = answers(hang_in_the_loop if is_async else hang, 3, timeout_s=0.2)
    release.set()
    assert got == ["0", "error: t did not return within 0.2 s", "2"]


def test_a_timeout_of_the_tools_own_is_its_exception():
    async def give_up(n: int) -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(30)

    assert answers(give_up) == ["error: TimeoutError:"]


def test_calls_end_with_the_attempt():
    started, ended = asyncio.Event(), list[int]()

    async def hang(n: int) -> None:
        try:
            started.set()
            await asyncio.sleep(30)
        finally:
            ended.append(n)

    async def cancel() -> None:
        calls = [ToolCall(str(n), "t", f'{{"n": {n}}}') for n in range(2)]
        task = asyncio.create_task(call_tools({"t": tool(hang)}, calls, 30.0))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("x" * 10_000_000, f"error: the result of t has 10000000 characters; at most {MAX_RESULT_CHARS} are allowed"),
        (["x" * 10_000_000], f"error: the result of t has 10000004 characters; at most {MAX_RESULT_CHARS} are allowed"),
        ("x" * 10_000, "x" * MAX_ANSWER_CHARS + "..."),
        (b"\x89PNG\r\n", "error: the result is binary (6 bytes); only text can be returned"),
        ({"image": bytearray(3)}, "error: the result is binary (3 bytes); only text can be returned"),
    ],
    ids=["large", "large_json", "long", "binary", "binary_in_json"],
)
def test_a_result_that_is_too_large_or_binary_is_an_error(result: Any, expected: str):
    assert answers(lambda n: result) == [expected]


CALLS = '<tool_call>{"name": "wait", "arguments": {"n": 0}}</tool_call><tool_call>{"name": "wait"</tool_call>' + (
    '<tool_call>{"name": "wait", "arguments": {"n": 1}}</tool_call><tool_call>{"name": "wait"}'
)


def test_a_conversation_gets_all_answers_and_its_tokens_do_not_depend_on_which_is_first():
    """Among the calls are a malformed one, and one that is not closed, which gets no answer."""
    tokenizer, seen = tiny_tokenizer(), []
    for slow in (0, 1):

        async def wait(n: int, slow: int = slow) -> int:
            await asyncio.sleep(0.02 * (n == slow))
            return n

        agent = MultiTurn(tools=[tool(wait, "wait")])
        t = run(agent, ScriptedPolicy(tokenizer, CALLS, "12").generate, context(tokenizer))
        contents = [m["content"] for m in t.turns[1].messages]
        assert contents[0] == "0" and contents[1].startswith("error: the tool call is not valid JSON")
        assert contents[2:] == ["1", "12"]
        seen.append((path_ids(t.turns, 1).tolist(), [turn.seed for turn in t.turns]))
    assert seen[0] == seen[1]


def test_a_call_that_never_returns_does_not_end_the_run_and_is_counted():
    async def hang(n: int) -> None:
        await asyncio.sleep(30)

    tokenizer, agent = tiny_tokenizer(), MultiTurn(tools=[tool(hang, "wait")], tool_timeout_s=0.05)
    call = '<tool_call>{"name": "wait", "arguments": {"n": 0}}</tool_call>'
    t = run(agent, ScriptedPolicy(tokenizer, call, "12").generate, context(tokenizer))
    assert t.turns[1].messages[0]["content"] == "error: wait did not return within 0.05 s"
    t.reward = 1.0
    (found,) = (m for m in flatten([t])[1] if m.name == "rollout/tool_errors")
    assert (found.sum, found.weight) == (1, 1)


@pytest.mark.parametrize("value", [0, -1, "1", float("inf"), float("nan")])
def test_a_time_limit_that_is_none_is_refused(value: Any):
    with pytest.raises(ConfigError, match=r"agent\.args\.tool_timeout_s is .*number above 0"):
        MultiTurn(tool_timeout_s=value)
