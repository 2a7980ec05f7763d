from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from meshrl.agent.tools import MAX_ANSWER_CHARS, TOOLS, ToolError, calculate, call_tool, tool_calls


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


def test_calls_are_found_in_order_among_other_text():
    text = 'I add <tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>, <tool_call>\n{"name": "b"}\n</tool_call>'
    assert [json.loads(body) for body in tool_calls(text)] == [{"name": "a", "arguments": {"x": 1}}, {"name": "b"}]
    assert tool_calls('<tool_call>{"name": "a"}') == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (r'{"name": "a", "arguments": {"x": "\ud83d"}}', "not valid JSON"),
        ("[]", 'must be a JSON object with a "name"'),
        ('{"name": 3}', 'must be a JSON object with a "name"'),
        ('{"name": "a", "arguments": [1]}', '"arguments" must be a JSON object'),
    ],
)
def test_a_malformed_call_is_answered_with_an_error(body, expected):
    text = asyncio.run(call_tool(TOOLS, body))
    assert text.startswith("error: ") and expected in text


def answer(**call):
    return asyncio.run(call_tool(TOOLS, json.dumps(call)))


def test_every_call_is_answered_with_text():
    assert answer(name="calculator", arguments={"expression": "6*7"}) == "42"
    assert answer(name="calculator", arguments={"expression": "1/0"}) == "error: division by zero"
    assert answer(name="calculator", arguments={}).endswith("of which ['expression'] are required; got []")
    assert "got ['expression', 'y']" in answer(name="calculator", arguments={"expression": "1", "y": 2})
    assert "must be of type string, got ['6']" in answer(name="calculator", arguments={"expression": ["6"]})
    assert "must be of type string, got None" in answer(name="calculator", arguments={"expression": None})
    assert answer(name="nope") == "error: no tool is called 'nope'; there are: calculator"


CALL = '{"name": "calculator", "arguments": {"expression": "x"}}'


def test_async_tools_are_awaited_and_long_answers_cut():
    async def shout(expression):
        return expression * MAX_ANSWER_CHARS * 2

    tools = {"calculator": replace(TOOLS["calculator"], function=shout)}
    text = asyncio.run(call_tool(tools, CALL))
    assert text == "x" * MAX_ANSWER_CHARS + "..."


def test_an_exception_of_a_tool_propagates():
    """A bug in a tool must not look like a model's mistake."""

    def crash(expression):
        raise KeyError("bug")

    tools = {"calculator": replace(TOOLS["calculator"], function=crash)}
    with pytest.raises(KeyError):
        asyncio.run(call_tool(tools, CALL))
