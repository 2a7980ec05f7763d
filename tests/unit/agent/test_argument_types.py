"""The types of a tool call's arguments, by the tool's JSON schema."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from meshrl.agent.parsing import ToolCall
from meshrl.agent.tools import Tool, call_tool

VALUES: dict[str, Any] = {
    "string": "1",
    "integer": 1,
    "number": 0.5,
    "boolean": True,
    "array": [1],
    "object": {"a": 1},
    "null": None,
}
ALLOWED: dict[str, set[str]] = {
    "string": {"string"},
    "integer": {"integer"},
    "number": {"integer", "number"},
    "boolean": {"boolean"},
    "array": {"array"},
    "object": {"object"},
}


def call(schema: dict[str, Any], value: Any) -> str:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    tool = Tool(name="show", description="", parameters=parameters, function=lambda x: f"got {x!r}")
    return asyncio.run(call_tool({"show": tool}, ToolCall("c", "show", json.dumps({"x": value}))))


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("wanted", ALLOWED)
def test_a_tool_gets_only_values_of_the_type_in_its_schema(wanted, name):
    """True and False are no numbers in JSON, although they are integers in Python."""
    expected = f"got {VALUES[name]!r}" if name in ALLOWED[wanted] else f"error: x of show must be of type {wanted}"
    assert call({"type": wanted}, VALUES[name]).startswith(expected)


@pytest.mark.parametrize("schema", [{}, {"type": "any"}], ids=["none", "other"])
@pytest.mark.parametrize("name", VALUES)
def test_a_schema_without_a_known_type_allows_every_value(schema, name):
    assert call(schema, VALUES[name]) == f"got {VALUES[name]!r}"


@pytest.mark.parametrize("name", VALUES)
def test_a_schema_with_several_types_allows_values_of_each(name):
    expected = (
        f"got {VALUES[name]!r}" if name in ("integer", "null") else "error: x of show must be of type integer or null"
    )
    assert call({"type": ["integer", "null"]}, VALUES[name]).startswith(expected)
