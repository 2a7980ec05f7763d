"""An agent for tool classes that were written for verl: with the methods create, execute, calc_reward and release.

Copy this file next to your config, and the entries of verl's tool config into it:

    agent:
      kind: verl_tools:VerlTools
      args:
        tools:
          - class_name: my_tools:SearchTool     # package.module:name in place of verl's package.module.name
            config: {url: http://127.0.0.1:9000}
            tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}

Each trajectory has an instance of each tool. Keywords of a method are read from the column `extra_info` of its row, as
in verl: extra_info["tools_kwargs"]["search"]["create_kwargs"]. The number that calc_reward returns is added to the
trajectory's reward, times `reward_weight`; verl gives it to its reward manager.
"""

from contextlib import AsyncExitStack, suppress
from typing import Any

from meshrl.agent.loop import AgentContext, MultiTurn
from meshrl.agent.tools import Tool
from meshrl.core.lookup import import_object
from meshrl.core.types import Generate, Prompt, Trajectory


def as_schema(schema: dict[str, Any]) -> Any:
    """The object that classes of verl expect, if verl is installed."""
    with suppress(ImportError):
        from verl.tools.schemas import OpenAIFunctionToolSchema

        return OpenAIFunctionToolSchema.model_validate(schema)
    return schema


class VerlTools(MultiTurn):
    def __init__(self, tools: list[dict[str, Any]], max_turns: int = 4, reward_weight: float = 1.0):
        self._made = [import_object(t["class_name"])(t.get("config", {}), as_schema(t["tool_schema"])) for t in tools]
        self._facts, self._reward_weight = [t["tool_schema"]["function"] for t in tools], reward_weight
        super().__init__([Tool(**facts, function=print) for facts in self._facts], max_turns)  # for the template

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        given, tools, rewards = (prompt.meta.get("extra_info") or {}).get("tools_kwargs") or {}, [], []
        async with AsyncExitStack() as instances:
            for facts, tool in zip(self._facts, self._made):
                own = given.get(facts["name"]) or {}
                created = await tool.create(**own.get("create_kwargs") or {})
                instance = created[0] if isinstance(created, tuple) else created  # former classes return the id alone
                instances.push_async_callback(tool.release, instance, **own.get("release_kwargs") or {})

                async def execute(_tool: Any = tool, _id: str = instance, _own: dict = own, **arguments: Any) -> str:
                    answer, *_ = await _tool.execute(_id, arguments, **_own.get("execute_kwargs") or {})
                    return str(getattr(answer, "text", answer))

                tools.append(Tool(**facts, function=execute))
                rewards.append((tool.calc_reward, instance, own.get("calc_reward_kwargs") or {}))
            trajectory = await MultiTurn(tools, self.max_turns).run(prompt, index, generate, ctx)
            values = [await calc_reward(instance, **own) for calc_reward, instance, own in rewards]
        if trajectory.turns:
            trajectory.turns[-1].reward = self._reward_weight * sum(v for v in values if isinstance(v, (int, float)))
        return trajectory
