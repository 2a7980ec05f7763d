from typing import Any

from pydantic import Field

from meshrl.config.base import Slice


class AgentConfig(Slice):
    kind: str = "single_turn"
    """single_turn = one answer; multi_turn = executes the model's tool calls until it makes none (agent.args: tools,
    default [calculator], each a built-in name or a function as package.module:name, max_turns, default 4,
    tool_timeout_s, default 60, sandbox, mcp_servers and documents: docs/tools.md); endpoint = a program that asks a
    chat API (agent.args: function or command, timeout_s, max_turns: docs/agents.md); environment = acts in an
    environment with reset and step (agent.args: environment, settings, max_turns, timeout_s:
    docs/add_an_environment.md); or a class or an async function as package.module:name (docs/python.md)"""
    args: dict[str, Any] = Field({})
    """keyword arguments of the agent's class or function"""
    max_failure_fraction: float = Field(0.2, ge=0, le=1)
    """share of a step's attempts in which the agent may raise an exception; such an attempt is left out of training,
    and with a higher share the run ends"""
