"""Tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as with Hermes and Qwen."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call as the model wrote it. error: for the model, why the call can't be made; empty if it can."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """All complete calls in order. A malformed one is a ToolCall with an error, which is returned to the model."""
    return [_parse(body) for body in _CALL.findall(text)]


def _parse(body: str) -> ToolCall:
    try:
        call = json.loads(body)
        json.dumps(call, ensure_ascii=False).encode()  # an escaped half of a surrogate pair is not a text
    except (ValueError, RecursionError) as cause:
        return ToolCall(error=f"the tool call is not valid JSON: {cause}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error='a tool call must be a JSON object with a "name"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(error='"arguments" must be a JSON object')
    return ToolCall(name=call["name"], arguments=arguments)
