"""Clients may rewrite, cut and fork their conversations: no sampled token changes, and a branch begins only there."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from functools import cache

import numpy as np
import pytest
from endpoint_clients import CALCULATOR, CALL, USER, TextPolicy, endpoint_context
from tiny_tokenizers import CHATML, DROPS_THINKING, SHOWS_TOOLS, tiny_tokenizer

from meshrl.agent.endpoint import chat
from meshrl.agent.endpoint.conversation import Conversation, RefusedRequest, is_same
from meshrl.agent.flatten import check_turns, path_ids
from meshrl.agent.loop import start_trajectory
from meshrl.core.errors import RequestError
from meshrl.core.types import Prompt


def conversation(answer, template=SHOWS_TOOLS, max_context_tokens=20000):
    tokenizer = tiny_tokenizer(template)
    ctx = endpoint_context(tokenizer, max_context_tokens=max_context_tokens)
    policy = TextPolicy(tokenizer, answer)
    trajectory = start_trajectory(Prompt(id="p", ordinal=5, messages=[USER]), 0, ctx)
    return Conversation(trajectory, policy.generate, ctx, lambda line: None), policy


async def ask(at, messages, tools=(CALCULATOR,), **settings):
    """The assistant's message, as a client of Chat Completions gets it."""
    body = {"messages": messages, "tools": list(tools), **settings}
    body = json.loads(json.dumps(body))
    reply = await at.reply(chat.read(body), json.dumps(body).encode())
    return chat.answer(chat.read(body), reply, "m")["choices"][0]["message"]


def text_for(request):
    """Another text for each context, which the tokenizer would encode otherwise: with merges."""
    draw = random.Random(request.context_ids.tobytes())
    word = "".join(draw.choice("ab12") for _ in range(6))
    return word + CALL if draw.random() < 0.3 else word


def followed(message, draw):
    """What a client sends after an answer."""
    calls = message.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": str(draw.randint(0, 99))} for call in calls]
    return results or [{"role": "user", "content": f"and {draw.randint(0, 99)}?"}]


def as_sdks_change_it(message, draw):
    """An answer as SDKs send it back: the same, with other spelling."""
    changed = copy.deepcopy(message)
    if changed.get("content") is None and draw.random() < 0.5:
        changed["content"] = ""
    for call in changed.get("tool_calls", ()):
        if draw.random() < 0.5:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=1)
    changed.pop("reasoning_content", None)
    return changed


@pytest.mark.parametrize("seed", range(64))
def test_sampled_tokens_stay_and_branches_begin_where_a_history_changes(seed):
    draw = random.Random(seed)
    at, policy = conversation(text_for)

    async def converse():
        """Returns the parent that each turn must have."""
        histories = [([USER], -1)]  # messages, and the turn that they continue
        parents = []
        for _ in range(10):
            place = draw.randrange(len(histories))
            messages, parent = histories[place]
            message = await ask(at, messages)
            parents.append(parent)
            number = len(at.trajectory.turns) - 1
            longer = [*messages, as_sdks_change_it(message, draw), *followed(message, draw)]
            kind = draw.choice(["goes on"] * 3 + ["parallel", "rewritten", "cut"])
            if kind == "parallel":  # another question at the same place
                histories.append(([*messages[:-1], {**messages[-1], "content": f"no, {draw.random()}"}], parent))
            if kind == "rewritten":  # an answer that was never sampled: the turn before it is continued
                other = [*messages, {"role": "assistant", "content": f"rewritten {draw.random()}"}, USER]
                histories.append((other, parent))
            if kind == "cut":  # the history is dropped
                histories[place] = ([{"role": "user", "content": f"summary {draw.random()}"}], -1)
            else:
                histories[place] = (longer, number)
        return parents

    parents = asyncio.run(converse())
    turns = at.trajectory.turns
    check_turns(at.trajectory)
    assert [turn.parent for turn in turns] == parents
    for number, (turn, request) in enumerate(zip(turns, policy.requests, strict=True)):
        np.testing.assert_array_equal(path_ids(turns, number)[: -len(turn.output_ids)], request.context_ids)
    assert len({request.seed for request in policy.requests}) == len(turns)


def test_the_same_request_gets_the_same_turn_and_another_seed_another_one():
    at, policy = conversation(lambda request: f"{request.seed % 97}")

    async def converse():
        first, again = await asyncio.gather(ask(at, [USER]), ask(at, [USER]))
        later = await ask(at, [USER])
        other = await ask(at, [USER], seed=1)
        return first, again, later, other

    first, again, later, other = asyncio.run(converse())
    assert first == again == later != other
    assert [turn.parent for turn in at.trajectory.turns] == [-1, -1] and len(policy.requests) == 2
    np.testing.assert_array_equal(policy.requests[0].context_ids, policy.requests[1].context_ids)


def test_a_request_that_failed_is_tried_again():
    fails = [True]

    def answer(request):
        if fails.pop() if fails else False:
            raise RefusedRequest(503, "for a moment")
        return "ab"

    at, _ = conversation(answer)

    async def converse():
        with pytest.raises(RefusedRequest):
            await ask(at, [USER])
        return await ask(at, [USER])

    assert asyncio.run(converse())["content"] == "ab"


def test_a_refused_request_leaves_the_turns_before_it():
    def answer(request):
        if request.max_new_tokens == 7:
            raise RequestError("ids out of range")
        return "ab"

    at, _ = conversation(answer)

    async def converse():
        with pytest.raises(RefusedRequest, match="ids out of range"):
            await ask(at, [USER], max_tokens=7)
        assert at.trajectory.status == "failed" and at.trajectory.failure.kind == "engine"
        message = await ask(at, [USER])
        with pytest.raises(RefusedRequest, match="ids out of range"):
            await ask(at, [USER, message, USER], max_tokens=7)

    asyncio.run(converse())
    assert (at.trajectory.status, len(at.trajectory.turns)) == ("done", 1)
    assert at.trajectory.failure is None


def test_tools_that_the_template_leaves_out_are_refused():
    at, _ = conversation(lambda request: "ab", template=CHATML)
    with pytest.raises(RefusedRequest, match="does not describe tools") as refusal:
        asyncio.run(ask(at, [USER]))
    assert refusal.value.status == 422


def test_a_client_that_leaves_does_not_end_its_turn():
    at, policy = conversation(lambda request: "ab")
    plain, release, seen = policy.generate, asyncio.Event(), []

    async def slow(request):
        seen.append(request)
        await release.wait()
        return await plain(request)

    at._generate = slow

    async def converse():
        first = asyncio.create_task(ask(at, [USER]))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        release.set()
        return await ask(at, [USER])

    assert asyncio.run(converse())["content"] == "ab" and len(at.trajectory.turns) == len(seen) == 1


def test_a_request_that_runs_at_the_end_is_no_turn():
    at, _ = conversation(lambda request: "ab")

    async def never(request):
        await asyncio.sleep(100)

    at._generate = never

    async def converse():
        task = asyncio.create_task(ask(at, [USER]))
        await asyncio.sleep(0.01)
        await at.close()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(converse())
    assert at.trajectory.turns == []


@pytest.mark.parametrize("order", [(0, 3, 6), (6, 3, 0), (3, 0, 6)])
def test_turns_at_once_are_in_one_order_with_the_final_branch_last(order):
    """Three sub-agents of two turns each, whose answers arrive in different orders."""
    at, policy = conversation(text_for)
    plain = policy.generate

    async def slow(request):
        for _ in range(20):
            await asyncio.sleep(0)
        return await plain(request)

    at._generate = slow

    async def sub_agent(number, delay):
        messages = [{"role": "user", "content": f"part {number}"}]
        for _ in range(delay):
            await asyncio.sleep(0)
        message = await ask(at, messages)
        for _ in range(delay):
            await asyncio.sleep(0)
        await ask(at, [*messages, message, *followed(message, random.Random(number))])

    async def converse():
        await asyncio.gather(*(sub_agent(n, delay) for n, delay in enumerate(order)))
        await ask(at, [USER])
        await at.close()

    asyncio.run(converse())
    check_turns(at.trajectory)
    turns = at.trajectory.turns
    assert [turn.parent for turn in turns] == [-1, 0, -1, 2, -1, 4, -1]
    texts = ["".join(m["content"] for m in turn.messages[:-1]) for turn in turns]
    assert [t for t in texts if t.startswith("part")] == ["part 0", "part 1", "part 2"]
    assert turns[-1].messages[:-1] == []  # the prompt's own question
    assert [turn.seed for turn in turns] == _in_order()


@cache
def _in_order():
    """The seeds of the same turns, one after the other."""
    at, _ = conversation(text_for)

    async def converse():
        for n in range(3):
            messages = [{"role": "user", "content": f"part {n}"}]
            message = await ask(at, messages)
            await ask(at, [*messages, message, *followed(message, random.Random(n))])
        await ask(at, [USER])
        await at.close()

    asyncio.run(converse())
    return [turn.seed for turn in at.trajectory.turns]


def test_other_tools_are_another_context():
    at, _ = conversation(lambda request: "ab")

    async def converse():
        message = await ask(at, [USER])
        await ask(at, [USER, message, USER], tools=())

    asyncio.run(converse())
    assert [turn.parent for turn in at.trajectory.turns] == [-1, -1]


def test_a_template_that_drops_thinking_starts_a_new_row():
    at, _ = conversation(lambda request: "<think>hm</think>ab", template=DROPS_THINKING)

    async def converse():
        message = await ask(at, [USER], tools=())
        await ask(at, [USER, message, USER], tools=())

    asyncio.run(converse())
    assert [turn.parent for turn in at.trajectory.turns] == [-1, -1]


def test_a_conversation_that_fills_the_context_is_refused_and_truncated():
    at, _ = conversation(lambda request: "ab" * 20, max_context_tokens=90)

    async def converse():
        message = await ask(at, [USER], tools=())
        with pytest.raises(RefusedRequest, match="context_length_exceeded") as refusal:
            await ask(at, [USER, message, {"role": "user", "content": "1" * 60}], tools=())
        return refusal.value.status

    assert asyncio.run(converse()) == 400
    assert at.trajectory.status == "truncated" and len(at.trajectory.turns) == 1


def call(call_id, arguments='{"a": 1}', name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def message(content="ab", **fields):
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    "sampled,sent,same",
    [
        (message(), message(" ab\n"), True),
        (message(), message("abc"), False),
        (message(), {"role": "user", "content": "ab"}, False),
        (message(reasoning_content="hm"), message(), True),
        (message("", tool_calls=[call("1")]), message("", tool_calls=[call("1", '{"a":1}')]), True),
        (message("", tool_calls=[call("1")]), message("", tool_calls=[call("2")]), False),
        (message("", tool_calls=[call("1")]), message("", tool_calls=[call(None, {"a": 1})]), True),
        (message("", tool_calls=[call("1")]), message("", tool_calls=[call(None, {"a": 2})]), False),
        (message("", tool_calls=[call("1")]), message("", tool_calls=[call(None, name="g")]), False),
        (message("", tool_calls=[call("1")]), message(""), False),
        (message(tool_call_id="1"), message(tool_call_id="2"), False),
    ],
)
def test_messages_are_compared_by_what_they_mean(sampled, sent, same):
    assert is_same(sampled, sent) == same
