from typing import Any

from pydantic import Field

from meshrl.config.base import Slice


class AgentConfig(Slice):
    kind: str = "single_turn"
    """a built-in agent, or a class as package.module:name"""
    args: dict[str, Any] = Field({})
    """keyword arguments of the agent's class"""
