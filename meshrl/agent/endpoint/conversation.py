"""The requests of a client to the endpoint as turns of a trajectory.

A chat client sends its complete conversation with each request. The turn that it continues is found by its messages,
and that turn's ids are taken as they were sampled: only the messages after it are rendered. Any other history starts a
new branch of the tree.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshrl.agent.flatten import path_ids
from meshrl.agent.loop import AgentContext, context_after, prompt_ids, take_turn
from meshrl.agent.parsing import as_value, for_template, parse
from meshrl.core.errors import DataError, Failure, MeshrlError
from meshrl.core.types import Generate, SamplingParams, Trajectory, Turn
from meshrl.data.chat import Message, image_literal, needs_calls, render, render_text
from meshrl.data.media import content_text

MAX_AT_ONCE = 64  # requests of one trajectory
_FINISH = {"stop": "stop", "length": "length", "context": "length"}


class RefusedRequest(Exception):
    """A request of a client that is answered with an HTTP status. retry_after_s: for status 429 and 503."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None):
        super().__init__(message)
        self.status, self.message, self.retry_after_s = status, message, retry_after_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A request, in the terms of every dialect. messages: with content as text, and the arguments of calls as values;
    ids: int32[C], in place of messages. sampling: what the client asked for, such as temperature: in training, the
    run's values replace it. max_tokens: None = the run's. source: route and digest of the request, for people."""

    messages: list[Message] = field(default_factory=list)
    ids: np.ndarray | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReply:
    """An answer. message: as the client gets it, with content, reasoning_content and tool_calls. finish: stop, length
    or tool_calls. num_context: tokens before the answer. tokens: the text of each sampled token, if the client asked
    for logprobs."""

    id: str
    created: int
    turn: Turn
    message: Message
    finish: str
    num_context: int
    tokens: list[str]


@dataclass(slots=True)
class _Node:
    """A turn in the tree of conversations. turn: its index; -1 = the root. messages: those after the parent's, as the
    client knows them, and its answer at the end. rendered: the same with the answer as templates get it."""

    turn: int = -1
    parent: _Node | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rendered: list[Message] = field(default_factory=list)
    ended_at: float = 0.0
    children: list[_Node] = field(default_factory=list)


class Conversation:
    """The requests of one trajectory. note: prints a line for the user. own_sampling: take the client's sampling, for a
    server that trains nothing. max_turns: further requests are refused. is_cut: the last request was refused, because
    the context is full or the turns are used up."""

    def __init__(
        self,
        trajectory: Trajectory,
        generate: Generate,
        ctx: AgentContext,
        note: Callable[[str], None],
        own_sampling: bool = False,
        max_turns: int | None = None,
    ):
        self.trajectory, self.ctx, self.max_turns, self.is_cut = trajectory, ctx, max_turns, False
        self.failed = asyncio.Event()  # an error ends the attempt
        self._generate, self._note, self._own_sampling = generate, note, own_sampling
        self._root = _Node()
        self._replies: dict[bytes, asyncio.Task[ModelReply]] = {}
        self._were_at_once = False

    async def parts(self, ask: Ask, digest: bytes) -> AsyncIterator[str | ModelReply]:
        """The answer, when it is complete."""
        yield await self.reply(ask, digest)

    async def reply(self, ask: Ask, digest: bytes) -> ModelReply:
        """The answer. digest: of the request; the same request again gets the same turn. A client that leaves does not
        end its turn. Raises: RefusedRequest."""
        task = self._replies.get(digest)
        if task is None:
            num_running = len(self._running())
            self._were_at_once |= num_running > 0
            if num_running >= MAX_AT_ONCE:
                raise RefusedRequest(429, f"{MAX_AT_ONCE} requests of this trajectory are running", retry_after_s=1)
            task = self._replies[digest] = asyncio.create_task(self._take_turn(ask))
            task.add_done_callback(lambda done: self._ended(digest, done))
        return await asyncio.shield(task)

    def _running(self) -> list[asyncio.Task[ModelReply]]:
        return [task for task in self._replies.values() if not task.done()]

    def _ended(self, digest: bytes, task: asyncio.Task[ModelReply]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._replies.pop(digest, None)  # the client may try again
        if not task.cancelled() and isinstance(task.exception(), MeshrlError):
            self.failed.set()

    async def close(self) -> None:
        """End the requests that run, and put turns that were sampled at the same time into an order that does not
        depend on time."""
        tasks = self._running()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._were_at_once:
            _sort_turns(self.trajectory)

    async def _take_turn(self, ask: Ask) -> ModelReply:
        ctx, trajectory, node, new = self.ctx, self.trajectory, self._root, list[Message]()
        if self.max_turns is not None and len(trajectory.started) >= self.max_turns:
            self._cut()
            raise RefusedRequest(400, f"the agent has had its {self.max_turns} turns (agent.args.max_turns)")
        if ask.ids is None:
            node, new = self._find(ask)
            if node.turn >= 0 and not node.children:
                trajectory.turns[node.turn].times.tool_s = time.perf_counter() - node.ended_at
            try:
                context = self._context(ask, node, new)
            except DataError as cause:
                raise RefusedRequest(422, str(cause)) from cause
        else:
            context = ask.ids
        if len(context) >= ctx.max_context_tokens:
            if not trajectory.turns:
                trajectory.status = "failed"
                trajectory.failure = Failure(kind="agent", message="the first request fills the context of the model")
            self._cut()
            raise RefusedRequest(
                400,
                f"the conversation has {len(context)} tokens, and the context of the model is {ctx.max_context_tokens} "
                "tokens; shorten the conversation (context_length_exceeded)",
            )
        shown = [] if node is self._root and new == (trajectory.prompt.messages or []) else new
        status, failure = trajectory.status, trajectory.failure
        turn = await take_turn(
            trajectory, context, self._generate, ctx, shown, sampling=self._sampling(ask), max_new_tokens=ask.max_tokens
        )
        if turn is None:
            assert trajectory.failure is not None
            reason = trajectory.failure.message
            if trajectory.turns:  # the agent may go on
                trajectory.status, trajectory.failure = status, failure
            raise RefusedRequest(400, reason)
        if turn.stop_reason == "abort":
            raise RefusedRequest(503, "the engine stopped before the answer was complete", retry_after_s=1)
        turn.source = ask.source
        self.is_cut, trajectory.failure = False, None  # of a request before the first turn
        return self._record(ask, node, new, turn, len(context))

    def _cut(self) -> None:
        self.is_cut = True
        if self.trajectory.turns:
            self.trajectory.status = "truncated"

    def _sampling(self, ask: Ask) -> SamplingParams:
        own = self.ctx.sampling
        changed = dict[str, Any](
            stop=tuple(dict.fromkeys((*own.stop, *ask.stop))),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *ask.stop_token_ids))),
        )
        if self._own_sampling:
            changed |= {name: value for name, value in ask.sampling.items() if name != "seed"}
        else:
            for name, value in ask.sampling.items():
                if value != getattr(own, name, None):
                    self._note(f"a client asked for a {name} of its own: the run's own sampling is used in its place")
        return replace(own, **changed)

    def _find(self, ask: Ask) -> tuple[_Node, list[Message]]:
        """The turn with the longest conversation that the client's begins with, and the client's messages after it."""
        best, best_at = self._root, 0
        open_nodes = [(self._root, 0)]
        while open_nodes:
            node, at = open_nodes.pop()
            if at > best_at:
                best, best_at = node, at
            for child in node.children:
                end = at + len(child.messages)
                is_longer = child.tools == ask.tools and end < len(ask.messages)
                if is_longer and all(map(is_same, child.messages, ask.messages[at:end])):
                    open_nodes.append((child, end))
        return best, ask.messages[best_at:]

    def _context(self, ask: Ask, node: _Node, new: list[Message]) -> np.ndarray:
        """int32[C]"""
        ctx, prompt = self.ctx, self.trajectory.prompt
        if node.turn < 0:
            if prompt.messages and not ask.tools and new == prompt.messages:
                return prompt_ids(prompt, ctx.tokenizer, [])
            self._require_text(new)
            if ask.tools and render_text(ctx.tokenizer, new, ask.tools) == render_text(ctx.tokenizer, new):
                raise DataError(
                    "the chat template does not describe tools to the model; send none, or set data.chat_template "
                    "(`meshrl serve`: the model's own) to one that does, such as chatml_tools"
                )
            return render(ctx.tokenizer, new, tools=ask.tools)
        self._require_text(new)
        return context_after(self.trajectory, node.turn, _conversation(node), new, ctx, ask.tools)

    def _require_text(self, new: Sequence[Message]) -> None:
        for message in new:
            if literal := image_literal(self.ctx.tokenizer, content_text([message])):
                raise DataError(f"a message has {literal!r}, which stands for an image of the model")

    def _record(self, ask: Ask, node: _Node, new: list[Message], turn: Turn, num_context: int) -> ModelReply:
        number, tokenizer = next(i for i, each in enumerate(self.trajectory.turns) if each is turn), self.ctx.tokenizer
        stops = self.ctx.sampling.stop_token_ids
        parsed = parse(tokenizer, turn.output_ids, context=turn.context_ids, tools=ask.tools, stop_ids=stops)
        message = parsed.as_message(f"{number:03x}")
        finish = _FINISH[turn.stop_reason]
        if message.get("tool_calls") and finish == "stop":
            finish = "tool_calls"
        if ask.ids is None:
            rendered = for_template(message) if needs_calls(tokenizer) else turn.messages[-1]
            node.children.append(
                _Node(number, node, ask.tools, [*new, message], [*new, rendered], ended_at=time.perf_counter())
            )
        tokens = [tokenizer.decode([i]) for i in turn.output_ids.tolist()] if ask.logprobs else []
        return ModelReply(
            id=f"{self.trajectory.id}/{number}",
            created=int(time.time()),
            turn=turn,
            message=message,
            finish=finish,
            num_context=num_context,
            tokens=tokens,
        )


def _conversation(node: _Node | None) -> list[Message]:
    """The messages up to the answer of this node, as templates get them."""
    parts = []
    while node is not None:
        parts.append(node.rendered)
        node = node.parent
    return [message for part in reversed(parts) for message in part]


def is_same(sampled: Message, sent: Message) -> bool:
    """Whether a client's message is the recorded one. Answers with calls are compared by the ids of their calls, where
    the client sends these; other messages by their text and the values of their calls. Reasoning may be left out."""
    if sampled["role"] != sent["role"]:
        return False
    calls, sent_calls = sampled.get("tool_calls") or [], sent.get("tool_calls") or []
    if calls and sent_calls and all(call.get("id") for call in sent_calls):
        return [call["id"] for call in calls] == [call["id"] for call in sent_calls]
    named = [
        [(call["function"]["name"], as_value(call["function"]["arguments"])) for call in c] for c in (calls, sent_calls)
    ]
    texts = [content_text([message]).strip() for message in (sampled, sent)]
    return named[0] == named[1] and texts[0] == texts[1] and sampled.get("tool_call_id") == sent.get("tool_call_id")


def _sort_turns(trajectory: Trajectory) -> None:
    """Order the turns by their contexts and seeds, depth first; the branch of the last one stays the last."""
    turns = trajectory.turns
    last, final = len(turns) - 1, set[int]()
    while last >= 0:
        final.add(last)
        last = turns[last].parent
    keys = {
        i: (i in final, path_ids(turns, turn.parent).tolist() + turn.context_ids.tolist(), turn.seed)
        for i, turn in enumerate(turns)
    }
    order, stack = list[int](), [-1]
    while stack:
        at = stack.pop()
        order += [at] if at >= 0 else []
        stack += sorted((i for i, turn in enumerate(turns) if turn.parent == at), key=keys.__getitem__, reverse=True)
    places = {old: new for new, old in enumerate(order)} | {-1: -1}
    trajectory.turns = [turns[old] for old in order]
    for turn in trajectory.turns:
        turn.parent = places[turn.parent]
