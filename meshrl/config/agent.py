from typing import Any

from meshrl.config.base import Slice, field


class AgentConfig(Slice):
    kind: str = field("single_turn", "a built-in agent, or a class as package.module:name")
    args: dict[str, Any] = field({}, "keyword arguments of the agent's class")
