"""The endpoint by the clients of OpenAI and Anthropic, unchanged. `make test-vllm` runs this file: vLLM brings both."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess

import numpy as np
import pytest
from endpoint_clients import CALCULATOR, CALL, KEY, USER, answers, served
from tiny_tokenizers import SHOWS_TOOLS, tiny_tokenizer

from meshrl.data.chat import render

TEXTS = ("hm " + CALL, "it is 12")


def run_twice(converse, stream):
    """The contexts of the requests, and the text of the last answer."""

    async def both():
        async with served(answers(*TEXTS)) as at:
            text = await converse(at.url, stream)
            return [request.context_ids for request in at.policy.requests], text

    return asyncio.run(both())


async def by_chat(url, stream):
    openai = pytest.importorskip("openai", reason="vLLM brings it: make test-vllm")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        messages = [USER]
        while True:
            settings = dict(model="policy", messages=messages, tools=[CALCULATOR])
            if stream:
                async with client.chat.completions.stream(**settings) as events:
                    completion = await events.get_final_completion()
            else:
                completion = await client.chat.completions.create(**settings)
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                assert json.loads(call.function.arguments) == {"expression": "3*4"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "12"})


async def by_responses(url, stream):
    openai = pytest.importorskip("openai", reason="vLLM brings it: make test-vllm")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        items = [USER]
        tool = {"type": "function", **CALCULATOR["function"]}
        while True:
            settings = dict(model="policy", input=items, tools=[tool])
            if stream:
                async with client.responses.stream(**settings) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**settings)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "12"} for call in calls]


async def by_messages(url, stream):
    anthropic = pytest.importorskip("anthropic", reason="vLLM brings it: make test-vllm")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client:
        messages = [USER]
        of = CALCULATOR["function"]
        tool = {"name": of["name"], "description": "", "input_schema": of["parameters"]}
        while True:
            settings = dict(model="policy", max_tokens=200, messages=messages, tools=[tool])
            if stream:
                async with client.messages.stream(**settings) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**settings)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return message.content[0].text
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "12"} for call in calls]
            messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("converse", [by_chat, by_responses, by_messages])
def test_a_conversation_of_an_sdk(converse, stream):
    contexts, text = run_twice(converse, stream)
    expected, _ = run_twice(by_chat, False)
    assert text == "it is 12"
    for ours, theirs in zip(contexts, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_errors_are_those_of_the_sdk():
    openai = pytest.importorskip("openai", reason="vLLM brings it: make test-vllm")
    anthropic = pytest.importorskip("anthropic", reason="vLLM brings it: make test-vllm")

    async def ask():
        async with served(answers()) as at:
            async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="wrong") as client:
                with pytest.raises(openai.AuthenticationError, match="key is not valid"):
                    await client.chat.completions.create(model="m", messages=[USER])
            async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key=KEY) as client:
                with pytest.raises(openai.BadRequestError, match="n is 2; allowed: 1"):
                    await client.chat.completions.create(model="m", messages=[USER], n=2)
            async with anthropic.AsyncAnthropic(base_url=at.url, api_key=KEY) as client:
                with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
                    await client.messages.create(model="m", messages=[], max_tokens=5)

    asyncio.run(ask())


VERIFIERS = """
import asyncio, json, sys
from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.client import generate
from transformers import AutoTokenizer

async def ask(url, key, folder):
    renderer = create_renderer(AutoTokenizer.from_pretrained(folder))
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    settings = dict(messages=[{"role": "user", "content": "ab?"}], cache_salt="1", extra_headers={"x-session-id": "s"})
    sampling = {"max_tokens": 9}
    found = await generate(client=client, renderer=renderer, model="policy", sampling_params=sampling, **settings)
    names = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason", "content")
    print(json.dumps({name: found[name] for name in names}))

asyncio.run(ask(*sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_client_of_verifiers(tmp_path):
    """The token route by the client with which verifiers trains."""
    python = os.environ.get("MESHRL_VERIFIERS_PYTHON")
    if python is None:
        pytest.skip("set MESHRL_VERIFIERS_PYTHON to the Python of an environment with verifiers==0.4.0")
    tiny_tokenizer(SHOWS_TOOLS).save_pretrained(tmp_path)

    async def ask():
        async with served(answers("ab12")) as at:
            command = [python, "-c", VERIFIERS, at.url, KEY, str(tmp_path)]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env={})
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout), at.conversation.trajectory

    found, trajectory = asyncio.run(ask())
    (turn,) = trajectory.turns
    assert found["prompt_ids"] == turn.context_ids.tolist() and found["completion_ids"] == turn.output_ids.tolist()
    assert [np.float32(value) for value in found["completion_logprobs"]] == turn.logprobs.tolist()
    assert (found["finish_reason"], found["content"]) == ("stop", "ab12")
    np.testing.assert_array_equal(turn.context_ids, render(tiny_tokenizer(SHOWS_TOOLS), [USER]))
