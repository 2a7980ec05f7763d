from __future__ import annotations

import asyncio
import json
import math
import threading
from dataclasses import replace
from typing import Literal

import pytest

from meshrl.agent.parsing import ToolCall
from meshrl.agent.tools import MAX_ANSWER_CHARS, TOOLS, Tool, ToolError, as_tool, calculate, call_tool
from meshrl.core.errors import ConfigError
from meshrl.reward.replies import MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(3 + 4) * 12", "84"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 4", "0.25"),
        (" 2**10 ", "1024"),
        ("+5", "5"),
        ("2 ** -1", "0.5"),
    ],
)
def test_the_calculator_calculates(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("__import__('os').system('true')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("x + 1", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True + 1", "only numbers"),
        ("[1][0]", "only numbers"),
        ("1j * 1j", "only numbers"),
        ("1 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("1\0", "not an arithmetic expression"),
        ("(" * 250, "not an arithmetic expression"),
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 9999999 % 7", "too large"),
        ("10.0 ** 400", "too large"),
        ("1e308 * 10", "not a real number"),
        ("(-8) ** 0.5", "not a real number"),
        ("1" * 257, "at most 256"),
        (7, "at most 256"),
    ],
)
def test_the_calculator_refuses_other_expressions_before_evaluating_them(expression, expected):
    with pytest.raises(ToolError, match=expected):
        calculate(expression)


def test_nested_powers_stay_bounded_step_by_step():
    with pytest.raises(ToolError, match="too large"):
        calculate("*".join(["2**2000"] * 5))


def test_a_chain_of_signs_is_answered():
    assert calculate("-" * 100 + "1") == "1"


def answer(name, arguments):
    return asyncio.run(call_tool(TOOLS, ToolCall("c", name, json.dumps(arguments))))


def test_a_malformed_call_is_answered_with_its_error_and_not_executed():
    malformed = replace(CALL, arguments='{"expression": "6*7"}', error="not valid JSON: at char 0")
    assert asyncio.run(call_tool(TOOLS, malformed)) == "error: not valid JSON: at char 0"


def test_every_call_is_answered_with_text():
    assert answer(name="calculator", arguments={"expression": "6*7"}) == "42"
    assert answer(name="calculator", arguments={"expression": "1/0"}) == "error: division by zero"
    assert answer(name="calculator", arguments={}).endswith("of which ['expression'] are required; got []")
    assert "got ['expression', 'y']" in answer(name="calculator", arguments={"expression": "1", "y": 2})
    assert "must be of type string, got ['6']" in answer(name="calculator", arguments={"expression": ["6"]})
    assert "must be of type string, got None" in answer(name="calculator", arguments={"expression": None})
    assert answer(name="nope", arguments={}) == "error: no tool is called 'nope'; there are: calculator"


CALL = ToolCall("c", "calculator", '{"expression": "x"}')


def test_async_tools_are_awaited_and_long_answers_cut():
    async def shout(expression):
        return expression * MAX_ANSWER_CHARS * 2

    tools = {"calculator": replace(TOOLS["calculator"], function=shout)}
    text = asyncio.run(call_tool(tools, CALL))
    assert text == "x" * MAX_ANSWER_CHARS + "..."


def calls(function, **arguments):
    """The answer of a tool that is this function."""
    tool = as_tool(function, "agent.args.tools")
    return asyncio.run(call_tool({tool.name: tool}, ToolCall("c", tool.name, json.dumps(arguments))))


class WithoutText(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("bug"), "error: KeyError: 'bug'"),
        (ValueError("a\nb \ud83d"), "error: ValueError: a b ?"),
        (StopIteration(), "error: StopIteration: "),
        (SystemExit(3), "error: SystemExit: 3"),
        (asyncio.CancelledError("a task of the tool"), "error: CancelledError: a task of the tool"),
        (WithoutText(), "error: WithoutText (its __str__ raised ValueError)"),
        (ToolError("not today"), "error: not today"),
        (RuntimeError("x" * 1000), "error: RuntimeError: " + "x" * (MAX_MESSAGE_CHARS - 14)),
    ],
)
def test_an_exception_of_a_tool_is_an_answer_in_one_bounded_line(error, expected):
    def crash():
        """Raises an exception."""
        raise error

    async def crash_later():
        """Raises an exception in the event loop."""
        raise error

    assert calls(crash) == expected.strip()
    if not isinstance(error, StopIteration):  # it does not pass through a coroutine
        assert calls(crash_later) == expected


def test_a_tool_that_blocks_does_not_block_the_event_loop():
    """The tool waits for the loop, which waits for the tool."""
    asked, answered = threading.Event(), threading.Event()

    def wait() -> bool:
        """Waits until the event loop has answered."""
        asked.set()
        return answered.wait(30)

    async def both() -> str:
        tool = as_tool(wait, "agent.args.tools")
        answer = asyncio.ensure_future(call_tool({"wait": tool}, ToolCall("c", "wait", "{}")))
        while not asked.is_set():
            await asyncio.sleep(0.001)
        answered.set()
        return await answer

    assert asyncio.run(both()) == "true"


@pytest.mark.parametrize("loop_has_ended", [True, False])
def test_a_tool_that_never_returns_does_not_delay_the_end_of_the_run(loop_has_ended, monkeypatch):
    """Its call is cancelled when the phase misses its deadline. Its thread is not waited for, and a late result is
    dropped."""
    release, ended = threading.Event(), threading.Event()
    problems = list[object]()
    monkeypatch.setattr(threading, "excepthook", problems.append)

    def hang():
        """Waits for the end of the test."""
        release.wait(30)
        ended.set()

    async def give_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, problem: problems.append(problem))
        tool = as_tool(hang, "agent.args.tools")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call_tool({"hang": tool}, ToolCall("c", "hang", "{}")), 0.01)
        if not loop_has_ended:
            end_call()
            await asyncio.sleep(0)

    def end_call() -> None:
        assert not ended.is_set()
        mine = [thread for thread in threading.enumerate() if thread.name == "tool hang"]
        assert [thread.daemon for thread in mine] == [True]
        release.set()
        mine[0].join(30)

    asyncio.run(give_up())
    if loop_has_ended:
        end_call()
    assert ended.is_set() and not problems


def search(
    query: str, limit: int = 3, exact: bool | None = None, order: Literal["new", "old"] = "new", rate: float = 1.0
) -> dict:
    """Searches the notes.

    Args:
        query: the words to look for
        limit: the largest number of results
        exact: whether each word must occur
        order: which results come first
        rate: weight of titles
    """
    return {"query": query, "limit": limit, "exact": exact, "order": order, "rate": rate}


def test_a_plain_function_is_a_tool_by_its_types_and_docstring():
    tool = as_tool(search, "agent.args.tools")
    assert (tool.name, tool.description) == ("search", "Searches the notes.")
    assert tool.parameters["required"] == ["query"]
    properties = tool.parameters["properties"]
    assert {name: schema["type"] for name, schema in properties.items()} == {
        "query": "string", "limit": "integer", "exact": "boolean", "order": "string", "rate": "number"
    }  # fmt: skip
    assert properties["query"]["description"] == "the words to look for"
    assert properties["order"]["enum"] == ["new", "old"]
    assert set(tool.schema["function"]) == {"name", "description", "parameters"}
    assert as_tool(tool, "agent.args.tools") is tool


def test_answers_that_are_no_text_are_json():
    expected = {"query": "é", "limit": 3, "exact": None, "order": "old", "rate": 2}
    assert calls(search, query="é", exact=None, order="old", rate=2) == json.dumps(expected, ensure_ascii=False)

    async def later() -> list[float]:
        """Returns a list."""
        return [1.5, float("nan")]

    assert calls(later) == "[1.5, NaN]"

    def starts() -> list[float]:
        """Returns an awaitable."""
        return later()

    assert calls(starts) == "[1.5, NaN]"
    for value, text in ((3.0, "3.0"), (None, "null"), ({1}, '"{1}"'), ("a \ud83d", "a ?")):

        def constant(value=value):
            return value

        tool = replace(TOOLS["calculator"], function=lambda expression, f=constant: f())
        assert asyncio.run(call_tool({"calculator": tool}, CALL)) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"query": "a", "limit": None}, "limit of search must be of type integer, got None"),
        ({"query": "a", "limit": True}, "limit of search must be of type integer, got True"),
        ({"query": "a", "exact": 1}, "exact of search must be of type boolean, got 1"),
        ({"query": "a", "order": "best"}, "order of search must be one of ['new', 'old'], got 'best'"),
    ],
)
def test_arguments_of_other_types_and_values_are_refused(arguments, expected):
    assert calls(search, **arguments) == f"error: {expected}"


def test_null_is_allowed_where_a_type_has_it():
    def pick(x: Literal[1, None]) -> str:
        """Picks x.

        Args:
            x: a number, or nothing
        """
        return str(x)

    assert [calls(pick, x=value) for value in (1, None)] == ["1", "None"]
    assert "x of pick must be of type " in calls(pick, x="1")


def test_a_value_of_one_of_several_types_is_allowed():
    def double(x: int | str) -> str:
        """Writes x twice.

        Args:
            x: a number or a text
        """
        return f"{x}{x}"

    assert [calls(double, x=value) for value in (1, "a")] == ["11", "aa"]
    assert "x of double must be of type integer or string, got [1]" in calls(double, x=[1])


def untyped(x):
    """Has no types.

    Args:
        x: anything
    """


def without_docstring(x: int): ...


def undescribed(x: int):
    """Does not describe x."""


def open_ended(*x: int, **more: int):
    """Takes any number of arguments.

    Args:
        x: numbers
        more: numbers by name
    """


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (untyped, "Argument x is missing a type hint"),
        (without_docstring, "no docstring"),
        (undescribed, "no description for the argument 'x'"),
        (open_ended, r"parameters \['x', 'more'\] can't be given by name"),
        (3, "is int 3; it must be a function or a meshrl.agent.tools:Tool"),
        (str, "is type <class 'str'>; it must be a function"),
        (math.sqrt, r"parameters \['x'\] can't be given by name"),
    ],
)
def test_what_can_not_be_described_to_a_model_is_refused(function, expected):
    with pytest.raises(ConfigError, match=f"agent.args.tools: .*{expected}"):
        as_tool(function, "agent.args.tools")


def test_a_tool_whose_schema_has_no_properties_takes_no_arguments():
    tool = Tool(name="now", description="Returns the time.", parameters={"type": "object"}, function=lambda: "noon")
    assert asyncio.run(call_tool({"now": tool}, ToolCall("c", "now", "{}"))) == "noon"
    refused = asyncio.run(call_tool({"now": tool}, ToolCall("c", "now", '{"zone": "UTC"}')))
    assert refused == "error: now takes the arguments [], of which [] are required; got ['zone']"
