"""`agent.kind: endpoint`: a program that speaks to a model by HTTP is the agent. It runs unchanged, against an endpoint
that samples from the model in training, and its requests become the turns of the trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from meshrl.agent.endpoint.conversation import Conversation
from meshrl.agent.endpoint.programs import (
    AgentProgram,
    AsyncProgram,
    Call,
    CommandProgram,
    Outcome,
    ProgramFailed,
    WorkerProgram,
    unknown_parameters,
)
from meshrl.agent.loop import AgentContext, RunOfAgent, start_trajectory
from meshrl.agent.tools import check_limits
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.lookup import look_up
from meshrl.core.types import Generate, Prompt, Trajectory

MODEL = "policy"
"""The model's name for clients, which may send any other."""


class EndpointAgent:
    """Runs a program for each attempt, with the URL of the endpoint and a key of this attempt.

    function: package.module:name. An async function runs in the controller's event loop, any other in a worker process.
    It gets those of the keywords of `programs.Call` that its signature has, and may return a number, which is added to
    the trajectory's reward, or {"reward": number, "metrics": {name: number}}. command: a program and its arguments, in
    place of a function. timeout_s: of one attempt.
    max_turns: after which requests are refused. A program that ends with an exception because of such a refusal, or
    because the context is full, leaves a truncated trajectory.
    """

    def __init__(
        self,
        function: str | Callable[..., Any] | None = None,
        command: Sequence[str] | None = None,
        timeout_s: float = 600.0,
        max_turns: int | None = None,
    ) -> None:
        self.tools: list[dict[str, Any]] = []
        if (function is None) == (command is None):
            raise ConfigError("agent.args: give either function, as package.module:name, or command, a list of texts")
        check_limits(1 if max_turns is None else max_turns, timeout_s=timeout_s)
        self.timeout_s, self.max_turns = float(timeout_s), max_turns
        self._program = _program_of(function) if command is None else _command_of(command)
        self._secret, self._num_issued = secrets.token_bytes(32), 0
        self._open: dict[str, Conversation] = {}  # by key
        self._noted: set[str] = set()
        self._url: str | None = None
        self._print: Callable[[str], None] = lambda line: None

    @asynccontextmanager
    async def opened(self, run: RunOfAgent) -> AsyncIterator[None]:
        from meshrl.agent.endpoint.server import Endpoint  # the libraries of the server are loaded only here

        self._print = run.note
        server = Endpoint(self._open.get, MODEL, None, self._note_once)
        async with server.opened() as self._url:
            try:
                yield
            finally:
                await self._program.close()
                self._url = None

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        if self._url is None:
            raise DataError("the endpoint's agent is used outside of `opened`, so that its server does not run")
        if prompt.media:
            raise DataError(f"prompt {prompt.id!r} has images, which the endpoint does not send to its clients")
        trajectory = start_trajectory(prompt, index, ctx)
        conversation = Conversation(trajectory, generate, ctx, self._note_once, max_turns=self.max_turns)
        reward: float | None = None
        try:
            with self._key(conversation) as key:
                call = Call(
                    url=self._url,
                    base_url=f"{self._url}/v1",
                    api_key=key,
                    model=MODEL,
                    messages=prompt.messages or [],
                    answer=prompt.answer,
                    prompt={"id": prompt.id, "env": prompt.env, "meta": prompt.meta},
                )
                reward, trajectory.metrics = await self._attempt(conversation, call)
        except Exception as error:  # of the user's code
            if not conversation.is_cut or getattr(error, "kind", "") == "timeout":
                raise
        finally:
            await conversation.close()
        if trajectory.turns:
            trajectory.turns[-1].reward = reward
        elif trajectory.failure is None:
            raise ProgramFailed("the agent ended without a request to the model that was answered")
        return trajectory

    async def _attempt(self, conversation: Conversation, call: Call) -> Outcome:
        program = asyncio.ensure_future(self._program(call))
        failed = asyncio.create_task(conversation.failed.wait())
        try:
            await asyncio.wait({program, failed}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if program.done():
                return program.result()
            if not failed.done():
                raise ProgramFailed(
                    f"the agent has not ended within agent.args.timeout_s = {self.timeout_s:g} s", "timeout"
                )
            raise ProgramFailed("the engine failed while the agent was running")
        finally:
            for task in (program, failed):
                task.cancel()
            await asyncio.gather(program, failed, return_exceptions=True)

    @contextmanager
    def _key(self, conversation: Conversation) -> Iterator[str]:
        """A key that is valid inside of this context."""
        self._num_issued += 1
        name = f"{conversation.trajectory.id}\0{self._num_issued}"
        key = hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()
        self._open[key] = conversation
        try:
            yield key
        finally:
            del self._open[key]

    def _note_once(self, line: str) -> None:
        if line not in self._noted and len(self._noted) < 20:
            self._noted.add(line)
            self._print(f"endpoint: {line}")


def _program_of(function: str | Callable[..., Any] | None) -> AgentProgram:
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"  # type: ignore[union-attr]
    found = look_up(function, {}, "agent.args.function") if isinstance(function, str) else function
    if not callable(found):
        raise ConfigError(f"agent.args.function {name!r} is {found!r:.80}; it must be a function")
    if unknown := unknown_parameters(found):
        raise ConfigError(
            f"agent.args.function {name!r} has the parameters {', '.join(unknown)}, which the endpoint does not give; "
            "it gives url, base_url, api_key, model, messages, answer and prompt"
        )
    if inspect.iscoroutinefunction(found):
        return AsyncProgram(found, name)
    if "<" in name or name.startswith("__main__:"):
        raise ConfigError(
            f"agent.args.function {name!r} runs in worker processes, which import it; define it at the top level of a "
            "module, or with `async def`"
        )
    return WorkerProgram(name)


def _command_of(command: Any) -> AgentProgram:
    if not isinstance(command, list | tuple) or not command or not all(isinstance(each, str) for each in command):
        raise ConfigError(
            f"agent.args.command is {command!r:.80}; it must be a list of texts, such as [python, agent.py]"
        )
    return CommandProgram(command)
