"""Every dialect, plain and streamed, samples from the contexts and with the seeds of multi_turn."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest
from endpoint_clients import CALCULATOR, CALL, DIALECTS, USER, TextPolicy, answers, endpoint_context, send, served
from tiny_tokenizers import SHOWS_TOOLS, tiny_tokenizer

from meshrl.agent.flatten import check_turns, leaf_paths
from meshrl.agent.loop import MultiTurn, prompt_ids
from meshrl.core.types import Prompt


def of_multi_turn(*texts):
    tokenizer = tiny_tokenizer(SHOWS_TOOLS)
    agent, policy = MultiTurn(), TextPolicy(tokenizer, answers(*texts))
    agent.tools = [CALCULATOR]
    prompt = Prompt(id="p", ordinal=5, messages=[USER])
    trajectory = asyncio.run(agent.run(prompt, 0, policy.generate, endpoint_context(tokenizer)))
    return trajectory, policy


def of_endpoint(dialect, stream, *texts):
    async def converse():
        async with served(answers(*texts)) as at:
            conversation, ask = [USER], DIALECTS[dialect]
            while True:
                message = await ask(at.url, conversation, [CALCULATOR], stream)
                conversation.append(message)
                for call in message.get("tool_calls", ()):
                    assert json.loads(call["function"]["arguments"]) == {"expression": "3*4"}
                    assert re.fullmatch("[0-9a-z]{9}", call["id"])  # Mistral's template refuses other ones
                    conversation.append({"role": "tool", "tool_call_id": call["id"], "content": "12"})
                if not message.get("tool_calls"):
                    return at.conversation.trajectory, at.policy, message

    return asyncio.run(converse())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_conversation_with_a_tool_is_that_of_multi_turn(dialect, stream):
    texts = ("hm " + CALL, CALL, "it is 12")
    expected, its_policy = of_multi_turn(*texts)
    found, policy, message = of_endpoint(dialect, stream, *texts)
    check_turns(found)
    assert message["content"] == "it is 12" and found.status == expected.status == "done"
    for ours, theirs in zip(policy.requests, its_policy.requests, strict=True):
        np.testing.assert_array_equal(ours.context_ids, theirs.context_ids)
        assert (ours.id, ours.seed, ours.max_new_tokens) == (theirs.id, theirs.seed, theirs.max_new_tokens)
        assert ours.sampling == theirs.sampling
    assert [turn.parent for turn in found.turns] == [-1, 0, 1] and leaf_paths(found.turns) == [[0, 1, 2]]
    assert all(re.fullmatch(r"POST /v1/[a-z/]+ [0-9a-f]{8}", turn.source) for turn in found.turns)
    assert len({turn.source for turn in found.turns}) == 3 and not expected.turns[0].source
    for turns in (found.turns, expected.turns):
        assert [turn.times.tool_s > 0 for turn in turns] == [True, True, False]


def test_the_token_route_takes_and_returns_ids():
    async def converse():
        async with served(answers("ab", "12")) as at:
            ctx = at.conversation.ctx
            first = prompt_ids(at.conversation.trajectory.prompt, ctx.tokenizer, [])
            body = {"token_ids": first.tolist(), "sampling_params": {"max_tokens": 50, "temperature": 1.0}}
            answer = (await send(at.url, "/inference/v1/generate", body)).json()
            choice = answer["choices"][0]
            turn = at.conversation.trajectory.turns[0]
            assert choice["token_ids"] == turn.output_ids.tolist() and choice["finish_reason"] == "stop"
            content = choice["logprobs"]["content"]
            assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
            assert [np.float32(entry["logprob"]) for entry in content] == turn.logprobs.tolist()
            assert choice["weight_versions"] == turn.versions.tolist()
            assert answer["usage"]["prompt_tokens"] == len(first)
            body["token_ids"] = [*first.tolist(), *choice["token_ids"], 7, 8]
            assert (await send(at.url, "/inference/v1/generate", body)).status_code == 200
            assert at.policy.requests[0].seed != at.policy.requests[1].seed
            return at.conversation.trajectory

    trajectory = asyncio.run(converse())
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]
    np.testing.assert_array_equal(trajectory.turns[1].context_ids, [7, 8])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_an_answer_that_is_cut_is_marked_and_has_its_usage(path):
    async def ask(stream):
        async with served(answers("ab12ab12")) as at:
            limit = {"max_tokens": 4, "max_output_tokens": 4, "stream": stream}
            options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
            body = {"messages": [USER], "input": "ab?", **limit, **options}
            return (await send(at.url, path, body)).text

    for stream in (False, True):
        text = asyncio.run(ask(stream))
        reason = {"chat": '"finish_reason":"length"', "messages": '"max_tokens"', "responses": '"max_output_tokens"'}
        assert reason[path.split("/")[2]] in text.replace(": ", ":")
        assert any(f'{name}_tokens":4' in text.replace(": ", ":") for name in ("completion", "output"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_tools_that_a_client_switches_off_are_not_in_the_prompt(path, choice):
    async def ask():
        async with served(answers("ab")) as at:
            function = CALCULATOR["function"]
            tool = {**CALCULATOR, "input_schema": {}} | ({} if "chat" in path else {"name": function["name"]})
            body = {"messages": [USER], "input": "ab?", "max_tokens": 9, "tools": [tool], "tool_choice": choice}
            assert (await send(at.url, path, body)).status_code == 200
            ctx = at.conversation.ctx
            return at.policy.requests[0].context_ids, prompt_ids(at.conversation.trajectory.prompt, ctx.tokenizer, [])

    np.testing.assert_array_equal(*asyncio.run(ask()))


def test_logprobs_are_those_that_were_sampled():
    async def ask():
        async with served(answers("ab")) as at:
            body = {"messages": [USER], "logprobs": True}
            answer = (await send(at.url, "/v1/chat/completions", body)).json()
            return answer["choices"][0]["logprobs"]["content"], at.conversation.trajectory.turns[0]

    content, turn = asyncio.run(ask())
    assert [entry["token"] for entry in content] == ["a", "b", "<|im_end|>"]
    assert [np.float32(entry["logprob"]) for entry in content] == turn.logprobs.tolist()
