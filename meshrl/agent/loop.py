"""Agents, which make a Trajectory of a Prompt. An agent calls `generate` for turns and knows no engine.

`take_turn` has the code that all agents share (seeds, ids, statuses); an agent only decides what to ask next.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshrl.agent.flatten import TurnError, attach, path_ids
from meshrl.agent.mcp import McpServer
from meshrl.agent.parsing import for_template, format_name, function_call, parse
from meshrl.agent.python_tool import python_tool
from meshrl.agent.search import search_tool
from meshrl.agent.tools import ERROR, TOOLS, Tool, as_tool, call_tools, check_limits
from meshrl.core.errors import ConfigError, DataError, Failure, RequestError
from meshrl.core.lookup import look_up
from meshrl.core.types import (
    Generate,
    Prompt,
    Purpose,
    Request,
    SamplingParams,
    Status,
    StopReason,
    Trajectory,
    Turn,
    freeze,
    turn_seed,
)
from meshrl.data.chat import Message, continuation_ids, image_literal, needs_calls, render, render_text
from meshrl.data.decode import answer_text
from meshrl.data.media import find_spans
from meshrl.data.order import PromptFeed

# Aborted turns are continued below the agent: an abort that is returned here means that the engine failed.
_STATUS: dict[StopReason, Status] = {"stop": "done", "length": "truncated", "context": "truncated", "abort": "failed"}
_ANSWER = "stand-in answer of a tool"  # no template contains it
_ARGUMENTS = {"stand_in": "stand-in argument"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentContext:
    """The settings of all attempts at one prompt. Filled by the loop.

    group_id: as in Trajectory. sampling: with every stop id of the run in stop_token_ids.
    max_new_tokens: of one turn. max_context_tokens: limit of prompt + answers. min_version: oldest weights allowed.
    """

    tokenizer: Any
    sampling: SamplingParams
    max_new_tokens: int
    max_context_tokens: int
    run_seed: int
    group_id: str
    purpose: Purpose = "train"
    min_version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOfAgent:
    """What an agent gets of its run. folder: the run's. note: prints a line for the user."""

    folder: Path
    note: Callable[[str], None]


class Agent(Protocol):
    """Turns a prompt into a trajectory. One instance serves all prompts concurrently, so `run` must keep its
    state in local variables.

    An agent may also have the method `opened(run: RunOfAgent)`, which returns an asynchronous context manager, such as
    a function with contextlib.asynccontextmanager. It is entered before the ranks start and left after they have ended,
    also when the run fails, so that an agent may start and end a server of its own.
    """

    tools: list[dict[str, Any]]  # schemas for the rendered prompt; empty without tools

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        """Attempt number `index` of a group at this prompt, without a reward.

        Expected failures (a refused request, a prompt that fills the context) set the status. An exception fails this
        attempt; attempt.py has the rules.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The prompts, the agent that answers them, and the tokenizer."""

    tokenizer: Any
    agent: Agent
    train_prompts: PromptFeed | None
    eval_prompts: list[Prompt]
    num_eval_left_out: int  # held-out prompts over data.max_prompt_tokens
    stop_token_ids: tuple[int, ...]
    max_context_tokens: int
    tool_note: str | None = None  # about the chat template's calls of tools
    row_note: str | None = None  # about rows that are left out (data.bad_rows)


def start_trajectory(prompt: Prompt, index: int, ctx: AgentContext) -> Trajectory:
    """An empty trajectory for one attempt."""
    return Trajectory(prompt=prompt, group_id=ctx.group_id, index=index, purpose=ctx.purpose)


def prompt_ids(prompt: Prompt, tokenizer: Any, tools: list[dict[str, Any]]) -> np.ndarray:
    """The prompt's ids as data rendered them, with all placeholders of its images, else rendered now. int32[C]."""
    if prompt.ids is not None:
        return prompt.ids
    if not prompt.messages:
        raise DataError(f"prompt {prompt.id!r} has neither ids nor messages")
    return render(tokenizer, prompt.messages, tools=tools, media=prompt.media)


async def take_turn(
    trajectory: Trajectory,
    context_ids: np.ndarray,
    generate: Generate,
    ctx: AgentContext,
    new_messages: Sequence[Message] = (),
    media_spans: Sequence[tuple[str, int, int]] = (),
    sampling: SamplingParams | None = None,
    max_new_tokens: int | None = None,
) -> Turn | None:
    """Sample one turn on this full context, add it to the trajectory's tree, and set the trajectory's status.

    The turn's parent is found by ids, and its context is cut to the tokens after the parent. Its text, without the
    special tokens that end it, is decoded into `messages`, after new_messages (the new context for people and rewards).
    media_spans: places of the prompt's images in context_ids; by default they are found by their placeholders. Several
    turns of a trajectory may run at once. The seed depends only on run, ordinal, index, the context, and the number of
    earlier requests with the same context, not on the order of others. sampling: default, that of ctx; max_new_tokens:
    a limit below that of ctx. Returns None when no turn could be sampled. The status is then `truncated` if an earlier
    turn filled the context, `failed` if the prompt alone filled it or the engine refused the request.
    """
    number, prompt = len(trajectory.started), trajectory.prompt
    if not media_spans and prompt.media_spans and prompt.ids is not None:
        media_spans = find_spans(context_ids, prompt.media, int(prompt.ids[prompt.media_spans[0][1]]))
    room = ctx.max_context_tokens - len(context_ids)
    if room < 1:
        trajectory.status = "truncated" if trajectory.turns else "failed"
        if not trajectory.turns:
            trajectory.failure = Failure(
                kind="agent",
                message=f"the prompt of {len(context_ids)} tokens fills the context of {ctx.max_context_tokens}",
            )
        return None
    content = _content_seed(prompt, context_ids)
    occurrence = trajectory.started.count(content)
    trajectory.started.append(content)
    request = Request(
        id=f"{trajectory.id}/{number}",
        context_ids=context_ids,
        media=prompt.media,
        media_spans=list(media_spans),
        sampling=ctx.sampling if sampling is None else sampling,
        seed=turn_seed(ctx.run_seed, prompt.ordinal, trajectory.index, content + occurrence),
        max_new_tokens=min(ctx.max_new_tokens, room, room if max_new_tokens is None else max_new_tokens),
        min_version=ctx.min_version,
        session=trajectory.group_id,  # a group stays on one engine, which computes its prompt once
    )
    try:
        turn = await generate(request)
    except RequestError as refusal:
        trajectory.status, trajectory.failure = "failed", Failure(kind="engine", message=str(refusal))
        return None
    if not np.array_equal(turn.context_ids, context_ids):
        raise TurnError(
            f"trajectory {trajectory.id!r}, turn {number}: the engine returned a context of {len(turn.context_ids)} "
            f"tokens, which differs from the {len(context_ids)} tokens that were sent; ids must stay unchanged"
        )
    _insert(trajectory, turn, media_spans)
    text = answer_text(ctx.tokenizer, turn.output_ids, ctx.sampling.stop_token_ids)
    turn.messages = [*new_messages, {"role": "assistant", "content": text}]
    trajectory.status = _STATUS[turn.stop_reason]
    if trajectory.status == "failed":
        trajectory.failure = Failure(kind="engine", message=f"turn {number} ended with {turn.stop_reason!r}")
    return freeze(turn)


def _content_seed(prompt: Prompt, context_ids: np.ndarray) -> int:
    """A number of 64 bits for a context; 0 for the prompt's own."""
    if prompt.ids is not None and np.array_equal(context_ids, prompt.ids):
        return 0
    return int.from_bytes(blake2b(np.ascontiguousarray(context_ids).tobytes(), digest_size=8).digest())


def next_context(
    trajectory: Trajectory, new: Sequence[Message], ctx: AgentContext, tools: list[dict[str, Any]] | None = None
) -> np.ndarray:
    """The context of a further turn, after the last one: the ids so far, then the chat template's tokens for the
    messages `new` and a generation prompt. int32[C]. tools: the agent's. The conversation is the prompt's messages and
    those of all turns, in order.
    """
    if not trajectory.prompt.messages:
        raise DataError(f"prompt {trajectory.prompt.id!r} has no messages; a conversation needs them")
    conversation, with_calls = list(trajectory.prompt.messages), needs_calls(ctx.tokenizer)
    for turn in trajectory.turns:
        answer = _parsed_answer(turn, ctx, tools or ()) if with_calls else turn.messages[-1]
        conversation += [*turn.messages[:-1], answer]
    return context_after(trajectory, len(trajectory.turns) - 1, conversation, new, ctx, tools)


def _parsed_answer(turn: Turn, ctx: AgentContext, tools: Sequence[dict[str, Any]]) -> Message:
    stops = ctx.sampling.stop_token_ids
    parsed = parse(ctx.tokenizer, turn.output_ids, context=turn.context_ids, tools=tools, stop_ids=stops)
    calls = tuple(replace(call, name=call.name or "unknown") for call in parsed.tool_calls)  # each one is answered
    return for_template(replace(parsed, tool_calls=calls).as_message())


def context_after(
    trajectory: Trajectory,
    index: int,
    conversation: Sequence[Message],
    new: Sequence[Message],
    ctx: AgentContext,
    tools: list[dict[str, Any]] | None = None,
) -> np.ndarray:
    """The context that continues turn `index`, whose conversation ends with its answer, with the messages `new` and a
    generation prompt. int32[C].

    A template may render the conversation differently when other messages follow (it may drop earlier thinking). Then
    the context is rendered again, and the next turn starts a new row. It renders no answer with `tool_calls` so, which
    only a template gets that needs them (`needs_calls`), as it gets no reasoning in the content of an answer.
    """
    *history, answer = conversation
    calls = answer.get("tool_calls", ())
    if not calls:
        before = render_text(ctx.tokenizer, history, tools=tools)
        after = render_text(ctx.tokenizer, [*history, answer, *new], tools=tools)
        is_prefix = after.startswith(before) and after[len(before) :].lstrip().startswith(answer["content"].strip())
    if not calls and (not is_prefix or answer.get("reasoning_content")):
        return render(ctx.tokenizer, [*history, answer, *new], tools=tools, media=trajectory.prompt.media)
    so_far, stops = path_ids(trajectory.turns, index), ctx.sampling.stop_token_ids
    last = int(so_far[-1])
    added = continuation_ids(ctx.tokenizer, new, stops, tools, last if last in stops else None, calls)
    return np.concatenate([so_far, added])


def _insert(trajectory: Trajectory, turn: Turn, media_spans: Sequence[tuple[str, int, int]]) -> None:
    """Add a turn with its full context to the tree, and cut the context to the tokens after the turn's parent."""
    turn.parent = attach(trajectory.turns, turn.context_ids)
    num_earlier = len(path_ids(trajectory.turns, turn.parent))
    turn.context_ids = turn.context_ids[num_earlier:]
    turn.media_spans = [(name, start - num_earlier, size) for name, start, size in media_spans if start >= num_earlier]
    if turn.routed_experts is not None:
        turn.routed_experts = turn.routed_experts[num_earlier:]
    trajectory.turns.append(turn)


class SingleTurn:
    """One question, one answer."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        trajectory = start_trajectory(prompt, index, ctx)
        await take_turn(trajectory, prompt_ids(prompt, ctx.tokenizer, self.tools), generate, ctx)
        return trajectory


class MultiTurn:
    """Executes tool calls until the model makes none, its context is full, or it has had max_turns turns (`truncated`).

    tools: names in the table TOOLS of meshrl/agent/tools.py, or dotted paths `package.module:name` of a function with
    types and a docstring, or of a Tool. From Python, also these objects themselves.
    tool_timeout_s: of a call, which is then answered with an error. mcp_servers: commands of MCP servers, whose tools
    are added; they run while the agent is `opened`. documents: path of a table for the tool `search`, which is added.
    sandbox: how the tool `python` runs programs, a kind of meshrl/process/isolation.py.
    """

    def __init__(
        self,
        tools: Sequence[str | Tool | Callable[..., Any]] = ("calculator",),
        max_turns: int = 4,
        tool_timeout_s: float = 60.0,
        mcp_servers: Sequence[str] = (),
        documents: str | None = None,
        sandbox: str = "bubblewrap",
    ) -> None:
        check_limits(max_turns, tool_timeout_s=tool_timeout_s)
        key = "agent.args.tools"
        for name, listed in ((key, tools), ("agent.args.mcp_servers", mcp_servers)):
            if not isinstance(listed, (list, tuple)):
                raise ConfigError(f"{name} is {type(listed).__name__} {listed!r:.80}; it must be a list of names")
        if not tools and not mcp_servers and documents is None:
            raise ConfigError(f"{key} is empty; name at least one tool, or use agent.kind: single_turn")
        resolved = list[Tool]()
        for tool in tools:
            found = look_up(tool, {**TOOLS, "python": python_tool}, key) if isinstance(tool, str) else tool
            resolved.append(
                python_tool(sandbox, tool_timeout_s, "agent.args.sandbox")
                if found is python_tool
                else as_tool(found, key)
            )
        if sandbox != "bubblewrap" and "python" not in tools:
            raise ConfigError(
                f"agent.args.sandbox is {sandbox!r:.80}, and agent.args.tools has no `python`, which it is for"
            )
        self._servers = [McpServer(command, "agent.args.mcp_servers") for command in mcp_servers]
        resolved += [tool for server in self._servers for tool in server.tools]
        resolved += [] if documents is None else [search_tool(documents, "agent.args.documents")]
        self._tools: dict[str, Tool] = {tool.name: tool for tool in resolved}
        if len(self._tools) < len(resolved):
            twice = next(t.name for t in resolved if self._tools[t.name] is not t or resolved.count(t) > 1)
            raise ConfigError(f"{key}: two tools are named {twice!r}; give each its own name")
        self._tool_timeout_s = tool_timeout_s
        self.max_turns = max_turns
        self.tools = [tool.schema for tool in resolved]

    @asynccontextmanager
    async def opened(self, run: RunOfAgent) -> AsyncIterator[None]:
        async with AsyncExitStack() as servers:
            for server in self._servers:
                await servers.enter_async_context(server.opened())
            yield

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        if not prompt.messages:
            raise DataError(f"prompt {prompt.id!r} has no messages; a conversation with tools needs them")
        trajectory = start_trajectory(prompt, index, ctx)
        context, new = prompt_ids(prompt, ctx.tokenizer, self.tools), list[Message]()
        while True:
            turn = await take_turn(trajectory, context, generate, ctx, new)
            if turn is None or turn.stop_reason != "stop":
                return trajectory
            calls = parse(ctx.tokenizer, turn.output_ids, context=turn.context_ids, tools=self.tools).tool_calls
            if not calls:
                return trajectory
            if len(trajectory.turns) == self.max_turns:
                trajectory.status = "truncated"
                return trajectory
            started_at = time.perf_counter()
            answers = await call_tools(self._tools, calls, self._tool_timeout_s)
            turn.times.tool_s = time.perf_counter() - started_at
            new = [{"role": "tool", "content": answer} for answer in answers]
            for message in new:
                if image_literal(ctx.tokenizer, message["content"]):
                    message["content"] = f"{ERROR}the answer has a token that stands for an image"
            if needs_calls(ctx.tokenizer):
                new = [{**m, "tool_call_id": call.id, "name": call.name} for m, call in zip(new, calls)]
            context = next_context(trajectory, new, ctx, self.tools)


def require_tools_in_template(agent: Agent, tokenizer: Any, messages: Sequence[Message], template: str) -> str | None:
    """Check that the chat template describes the agent's tools to the model, and for MultiTurn that it renders the
    answers of tools, also after a second call, and that `parse` reads the calls that it renders.
    messages: of a prompt. template: what the template is, for errors.

    Returns: a note about a template that renders no calls."""
    if not agent.tools:
        return None
    advice = "Set data.chat_template to a template that describes tools (chatml_tools is built in), or use {}"
    if render_text(tokenizer, messages, tools=agent.tools) == render_text(tokenizer, messages):
        names = ", ".join(str(tool.get("function", tool).get("name")) for tool in agent.tools)
        raise ConfigError(
            f"{template}: it renders the same text with and without `tools`, so the model would not see the agent's "
            f"tools ({names}). {advice.format('an agent without tools')}"
        )
    if not isinstance(agent, MultiTurn):
        return None
    with_calls, name = needs_calls(tokenizer), agent.tools[0]["function"]["name"]

    def answered(*ids: str) -> list[Message]:
        call: Message = {"role": "assistant", "content": "a call"}
        if not with_calls:
            return [call, *({"role": "tool", "content": _ANSWER} for _ in ids)]
        call |= {"content": "", "tool_calls": [function_call(i, name, _ARGUMENTS) for i in ids]}
        return [call, *({"role": "tool", "content": _ANSWER, "tool_call_id": i, "name": name} for i in ids)]

    first, second = "call00001", "call00002"
    contexts = {"the answer of a tool": answered(first), "two calls in one answer": answered(first, second)}
    if agent.max_turns > 2:
        contexts["the answer to a second call"] = [*answered(first), *answered(second)]
    for case, new in contexts.items() if agent.max_turns > 1 else ():
        try:
            rendered = render_text(tokenizer, [*messages, *new], tools=agent.tools)
        except DataError as cause:
            fewer = ", or agent.args.max_turns: 2" if case == "the answer to a second call" else ""
            other = advice.format(f"an agent without tools{fewer}")
            raise ConfigError(f"{template}: it can't render {case}: {cause}. {other}") from cause
        if _ANSWER not in rendered:
            raise ConfigError(
                f"{template}: it leaves out messages of the role tool, the answers of tools. "
                f"{advice.format('an agent without tools')}"
            )
    written = _rendered_call(agent, name, tokenizer, messages)
    if written is None:
        return (
            f"{template}: it renders no `tool_calls` of messages, so it does not show how the model writes a call. "
            f"Calls are read in the format {format_name(tokenizer)!r} (docs/tools.md)"
        )
    calls = parse(tokenizer, written, tools=agent.tools).tool_calls
    if not any(not call.error and json.loads(call.arguments) == _ARGUMENTS for call in calls):
        shown = written[max(0, written.rindex(_ARGUMENTS["stand_in"]) - 120) :][:200]
        raise ConfigError(
            f"{template}: it writes a call as {shown!r}, which the format {format_name(tokenizer)!r} does not read "
            "(docs/tools.md lists all formats), so no call would be executed. "
            + advice.format("an agent of your own that reads this form")
        )
    return None


def _rendered_call(agent: Agent, name: str, tokenizer: Any, messages: Sequence[Message]) -> str | None:
    """A call of this tool as the template writes it; None if it does not."""
    before = render_text(tokenizer, messages, tools=agent.tools)
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):  # templates want one or the other
        message = {"role": "assistant", "content": "", "tool_calls": [function_call("call00001", name, arguments)]}
        try:
            text = render_text(tokenizer, [*messages, message], tools=agent.tools)
        except DataError:
            continue
        if _ARGUMENTS["stand_in"] in text:
            return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text))) :]
    return None
