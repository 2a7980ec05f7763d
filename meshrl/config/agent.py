from typing import Any

from pydantic import Field

from meshrl.config.base import Slice


class AgentConfig(Slice):
    kind: str = "single_turn"
    """single_turn = one answer; multi_turn = executes the model's tool calls until it makes none (agent.args: tools,
    default [calculator], and max_turns, default 4); or a class as package.module:name"""
    args: dict[str, Any] = Field({})
    """keyword arguments of the agent's class"""
