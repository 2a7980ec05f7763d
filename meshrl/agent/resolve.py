"""The agent of a run: by its name in the config, or an object of a Python caller."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, cast

from meshrl.agent.endpoint.agent import EndpointAgent
from meshrl.agent.environment import EnvironmentAgent
from meshrl.agent.loop import Agent, AgentContext, MultiTurn, RunOfAgent, SingleTurn
from meshrl.config.agent import AgentConfig
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import look_up
from meshrl.core.types import Generate, Prompt, Trajectory

AgentFunction = Callable[[Prompt, int, Generate, AgentContext], Awaitable[Trajectory]]
_PARAMETERS = ("prompt", "index", "generate", "ctx")  # of an agent

AGENTS: dict[str, Callable[..., Agent]] = {
    "single_turn": SingleTurn,
    "multi_turn": MultiTurn,
    "endpoint": EndpointAgent,
    "environment": EnvironmentAgent,
}


class FunctionAgent:
    """An agent that is a single async function and offers no tools."""

    def __init__(self, function: AgentFunction):
        self.function = function
        self.tools: list[dict[str, Any]] = []

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        return await self.function(prompt, index, generate, ctx)


def resolve_agent(cfg: AgentConfig) -> Agent:
    """The agent that a config names: a class, built with its args, or an async function, called with its args."""
    kind = look_up(cfg.kind, AGENTS, "agent.kind")
    name = f"agent.kind {cfg.kind!r}"
    if not callable(kind):
        raise ConfigError(f"{name} is {shown(kind)}; it must be a class or an async function")
    is_async = inspect.iscoroutinefunction(kind)
    try:
        inspect.signature(kind).bind(*(_PARAMETERS if is_async else ()), **cfg.args)
    except TypeError as cause:
        is_plain = inspect.isfunction(kind) and not is_async
        accepted = [name for name in inspect.signature(kind).parameters if not (is_async and name in _PARAMETERS)]
        hint = f"; allowed: {', '.join(accepted) or 'none'}"
        if is_plain:
            hint = "; an agent that is a function must be defined with `async def`"
        raise ConfigError(f"agent.args {cfg.args} don't fit {name}: {cause}{hint}") from cause
    return as_agent(partial(kind, **cfg.args) if is_async else kind(**cfg.args), name)


def as_agent(candidate: Any, name: str) -> Agent:
    """An object with `run` and `tools`, or an async function, as an agent. name: for errors."""
    if inspect.iscoroutinefunction(candidate):
        require_parameters(name, candidate, *_PARAMETERS)
        return FunctionAgent(candidate)
    if isinstance(candidate, type) or not hasattr(candidate, "run") or not hasattr(candidate, "tools"):
        raise ConfigError(
            f"{name} is {shown(candidate)}; it must be an object with the method `run` and the list `tools` of "
            "meshrl.agent.loop.Agent (an instance, not the class), or an async function as that method"
        )
    agent = cast(Agent, candidate)
    if not inspect.iscoroutinefunction(agent.run):
        raise ConfigError(f"{name}: its method `run` must be defined with `async def`")
    require_parameters(f"{name}.run", agent.run, *_PARAMETERS)
    if not isinstance(agent.tools, list) or not all(isinstance(tool, dict) for tool in agent.tools):
        raise ConfigError(
            f"{name}: its `tools` are {shown(agent.tools)}; they must be a list of JSON schemas, such as "
            "Tool.schema of meshrl.agent.tools, and empty for an agent without tools"
        )
    if hasattr(agent, "opened"):
        require_parameters(f"{name}.opened", agent.opened, "run")
    return agent


def opened(agent: Agent, run: RunOfAgent, kind: str) -> AbstractAsyncContextManager[object]:
    """The lifetime of an agent in a run; nothing for one without the method `opened`. kind: for errors."""
    method = getattr(agent, "opened", None)
    context = nullcontext() if method is None else method(run)
    if not isinstance(context, AbstractAsyncContextManager):
        raise ConfigError(
            f"agent {kind}: its method `opened` returned {shown(context)}; it must return an asynchronous context "
            "manager, such as a function with contextlib.asynccontextmanager"
        )
    return context


def require_parameters(name: str, function: Callable[..., Any], *parameters: str) -> None:
    """Raises: ConfigError when the function can't be called with as many arguments."""
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            f"{name} is {shown(function)}; meshrl calls it as {name}({', '.join(parameters)}): {error}"
        ) from None
    except ValueError:  # a function of C without a signature
        return


def shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
