"""`agent.kind: environment`: the model acts in an environment of the user, in the form of Gymnasium. Each answer is an
action; its observation is the next message, and its reward is that of the turn."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from meshrl.agent.endpoint.programs import ProgramFailed, reward_of
from meshrl.agent.loop import AgentContext, next_context, prompt_ids, start_trajectory, take_turn
from meshrl.agent.parsing import parse
from meshrl.agent.tools import MAX_RESULT_CHARS, CallThread, check_limits
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.lookup import look_up
from meshrl.core.types import Generate, Prompt, Trajectory, turn_seed
from meshrl.data.chat import Message, image_literal
from meshrl.reward.replies import error_line

Observation = str | Message | list[Message]
_STEP = ("observation", "reward", "terminated", "truncated", "info")
_CLOSE_TIMEOUT_S = 10.0


class Environment(Protocol):
    """One episode: an object is made for each attempt. Its methods are called one after the other, in one thread. Any
    of them may be async; then it is awaited in the controller's event loop. `close` may be missing."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """seed: 31 bits, equal for all attempts of a group. options: id, env, meta, messages and answer of the row.

        Returns: (observation, info). The observation is a text that is added to the row's last message after an empty
        line, or None. info is not used.
        """
        ...

    def step(self, action: str) -> tuple[Observation | None, float | None, bool, bool, dict[str, Any]]:
        """action: the answer without its reasoning.

        Returns: (observation, reward, terminated, truncated, info). The observation is a text, which becomes a message
        of the user, a message, or a list of them; at the end of the episode it is not used. reward: of the turn, None =
        none. info: plain JSON, which is logged, and which reward functions get, in the message of the answer.
        """
        ...

    def close(self) -> None: ...


class EnvironmentAgent:
    """Plays an episode in each attempt.

    environment: package.module:name of a class with the methods of Environment, or of a function that makes one; from
    Python, also the class. settings: its arguments. max_turns: after which the trajectory is truncated. timeout_s: of
    one call. A call that never returns keeps its thread, and its environment is not closed.
    """

    def __init__(
        self,
        environment: str | Callable[..., Environment],
        settings: Mapping[str, Any] | None = None,
        max_turns: int = 16,
        timeout_s: float = 60.0,
    ) -> None:
        key = "agent.args.environment"
        make: Any = look_up(environment, {}, key) if isinstance(environment, str) else environment
        check_limits(max_turns, timeout_s=timeout_s)
        is_class = inspect.isclass(make)
        try:
            inspect.signature(make).bind(**(settings or {}))
            if is_class:
                inspect.signature(make.reset).bind(make, seed=0, options={})
                inspect.signature(make.step).bind(make, "action")
        except (TypeError, AttributeError) as cause:
            raise ConfigError(
                f"{key} is {environment!r:.80}, with agent.args.settings {settings or {}}: {cause}. It must be a class "
                "that these settings fit, with the methods reset(self, *, seed, options) and step(self, action), or a "
                "function that makes such an object (docs/add_an_environment.md)"
            ) from cause
        self.tools: list[dict[str, Any]] = []
        self.max_turns, self.timeout_s = max_turns, float(timeout_s)
        self._make = partial(make, **(settings or {}))

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        thread, made = CallThread("environment"), list[Any]()

        def close() -> Any:
            return made[0].close() if made and hasattr(made[0], "close") else None

        try:
            making = thread.call(lambda: made.append(self._make()))
            await _result(making, "the constructor", self.timeout_s)
            trajectory = await self._episode(made[0], thread, prompt, index, generate, ctx)
        finally:  # also when the attempt is cancelled during a call: then `close` follows that call
            limit_s = min(self.timeout_s, _CLOSE_TIMEOUT_S)
            closing = asyncio.create_task(_result(thread.call(close, is_last=True), "close", limit_s))
            closing.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio prints it
            await asyncio.wait({closing})  # it goes on if this task is cancelled once more
        closing.result()
        return trajectory

    async def _episode(
        self, environment: Any, thread: CallThread, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext
    ) -> Trajectory:
        options = {name: getattr(prompt, name) for name in ("id", "env", "meta", "messages", "answer")}
        seed = turn_seed(ctx.run_seed, prompt.ordinal, 0, 0) >> 32
        resetting = thread.call(partial(environment.reset, seed=seed, options=options))
        observation, _ = _fields(await _result(resetting, "reset", self.timeout_s), "reset", ("observation", "info"))
        if observation is not None:
            prompt = _with_text(prompt, observation, ctx)
        trajectory = start_trajectory(prompt, index, ctx)
        context, new = prompt_ids(prompt, ctx.tokenizer, self.tools), list[Message]()
        while True:
            turn = await take_turn(trajectory, context, generate, ctx, new)
            if turn is None or turn.stop_reason != "stop":
                return trajectory
            action = parse(ctx.tokenizer, turn.output_ids, context=context).content
            started_at = time.perf_counter()
            result = await _result(thread.call(partial(environment.step, action)), "step", self.timeout_s)
            turn.times.tool_s = time.perf_counter() - started_at
            observation, reward, is_terminated, is_truncated, info = _fields(result, "step", _STEP)
            turn.reward = reward_of(reward.item() if isinstance(reward, np.generic) else reward, "step")
            if info:
                turn.messages[-1]["info"] = json.loads(json.dumps(info))
            if is_terminated:
                return trajectory
            if is_truncated or len(trajectory.turns) == self.max_turns:
                trajectory.status = "truncated"
                return trajectory
            new = _messages(observation, ctx)
            context = next_context(trajectory, new, ctx, self.tools)


async def _result(call: asyncio.Future[Any], name: str, timeout_s: float) -> Any:
    """The result of a call, also of an async function. name: for errors."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            result = await call
            return await result if inspect.isawaitable(result) else result
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ProgramFailed(f"{name} of the environment has not returned in {timeout_s:g} s", "timeout") from error
    except SystemExit as error:  # it would end the event loop
        raise ProgramFailed(error_line(error)) from error


def _fields(result: Any, method: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(result, tuple) or len(result) != len(names):
        raise ProgramFailed(f"{method} of the environment returned {result!r:.80}; it must return ({', '.join(names)})")
    return result


def _with_text(prompt: Prompt, text: Any, ctx: AgentContext) -> Prompt:
    """The prompt with a text at the end of its last message."""
    *earlier, last = prompt.messages or [{}]
    if not isinstance(last.get("content"), str):
        raise DataError(f"prompt {prompt.id!r} must end with a message of text, to which reset adds its observation")
    (added,) = _messages(text, ctx)
    return replace(
        prompt, ids=None, messages=[*earlier, {**last, "content": f"{last['content']}\n\n{added['content']}"}]
    )


def _messages(observation: Any, ctx: AgentContext) -> list[Message]:
    if isinstance(observation, str):
        observation = {"role": "user", "content": observation}
    messages = observation if isinstance(observation, list) and observation else [observation]
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
        content = message.get("content") if is_message else None
        if not isinstance(content, str) or len(content) > MAX_RESULT_CHARS or image_literal(ctx.tokenizer, content):
            raise ProgramFailed(
                f"an observation is {message!r:.80}; it must be a text, a message with role and content, or a list of "
                f"messages, of at most {MAX_RESULT_CHARS} characters and without tokens that stand for images"
            )
    return [{**message, "content": message["content"].encode(errors="replace").decode()} for message in messages]
