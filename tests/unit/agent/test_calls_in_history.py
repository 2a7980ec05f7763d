"""Templates that render the answer of a tool only after a message with `tool_calls`, as those of gpt-oss and Gemma 4:
the history has the calls as fields, and the sampled tokens stay as they are."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from test_agents import USER, ScriptedPolicy, context, run
from test_endpoint_histories import ask
from test_parsing import FORMAT, TYPES, WRITTEN
from tiny_tokenizers import tiny_tokenizer

from meshrl.agent.endpoint.conversation import Conversation
from meshrl.agent.flatten import check_turns, path_ids
from meshrl.agent.loop import MultiTurn, next_context, require_tools_in_template, start_trajectory, take_turn
from meshrl.agent.parsing import FORMATS
from meshrl.agent.tools import Tool
from meshrl.core.errors import ConfigError
from meshrl.core.types import Prompt
from meshrl.data.chat import needs_calls, render

OF_F = {"type": "object", "properties": TYPES, "required": []}
F = Tool(name="f", description="", parameters=OF_F, function=lambda **given: "12")
G = Tool(
    name="g", description="", parameters={"type": "object", "properties": {}, "required": []}, function=lambda: "7"
)
# The result of a tool has the name of its call, by the call's id; earlier reasoning is dropped.
NEEDS_CALLS = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{{ bos_token }}{% set ns = namespace(calls=none) %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% if not ns.calls %}{{ raise_exception('no call') }}{% endif %}"
    "{% for c in ns.calls %}{% if c.id == m.tool_call_id %}<|im_start|>{{ c.function.name }}\n{{ m.content }}<|im_end|>"
    "\n{% endif %}{% endfor %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool{{ \'_call\' }}>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool{{ '_call' }}>{% endfor %}<|im_end|>\n{% set ns.calls = m.tool_calls %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(name: str) -> Any:
    return tiny_tokenizer("{# " + " ".join(FORMATS[name].marks) + " #}" + NEEDS_CALLS)


@pytest.mark.parametrize("case", ["one", "two", "malformed", "two turns", "text before"])
@FORMAT
def test_the_next_context_is_the_sampled_ids_and_the_rendered_results(name: str, case: str):
    reasoning, first, second, malformed, _ = WRITTEN[name]
    texts = {"one": [first], "two": [first + second], "malformed": [first + malformed], "two turns": [first, first]}
    texts["text before"] = [reasoning + ("I add." if name != "llama3" else "") + first]
    tokenizer, agent = tokenizer_of(name), MultiTurn(tools=[F, G])
    policy = ScriptedPolicy(tokenizer, *texts[case], "ab", stop_text="}" if name == "llama3" else None)
    t = run(agent, policy.generate, context(tokenizer, max_context_tokens=8000, max_new_tokens=2000))
    check_turns(t)
    assert (t.status, [turn.parent for turn in t.turns]) == ("done", list(range(-1, len(texts[case]))))
    results = {"two": "f\n12<|im_end|>\n<|im_start|>g\n7", "malformed": "f\n12<|im_end|>\n<|im_start|>unknown\nerror: "}
    for number, turn in enumerate(t.turns[1:]):
        added = tokenizer.decode(turn.context_ids.tolist())
        assert added.startswith(
            "<|im_end|>" * (name == "llama3") + "\n<|im_start|>" + results.get(case, "f\n12<|im_end|>")
        )
        assert added.endswith("<|im_end|>\n<|im_start|>assistant\n")
        before = path_ids(t.turns, number)
        np.testing.assert_array_equal(policy.requests[number + 1].context_ids[: len(before)], before)
    assert t.turns[0].messages == [{"role": "assistant", "content": texts[case][0]}]  # as it was sampled


def test_after_a_stop_string_the_turns_end_is_context():
    tokenizer = tokenizer_of("hermes")
    policy = ScriptedPolicy(tokenizer, WRITTEN["hermes"][1], "ab", stop_text="</tool_call>")
    t = run(MultiTurn(tools=[F]), policy.generate, context(tokenizer))
    assert tokenizer.decode(t.turns[1].context_ids.tolist()).startswith("<|im_end|>\n<|im_start|>f\n12<|im_end|>")


def test_the_endpoint_has_the_contexts_of_multi_turn():
    """A question after an answer is rendered with the parts of the answer, without its reasoning."""
    reasoning, call, *_ = WRITTEN["gpt_oss"]
    texts = [reasoning + call, reasoning + "<|start|>assistant<|channel|>final<|message|>ab<|return|>", "12"]
    tokenizer = tokenizer_of("gpt_oss")
    ctx, agent = context(tokenizer), MultiTurn(tools=[F])
    theirs, ours = (ScriptedPolicy(tokenizer, *texts) for _ in range(2))
    run(agent, theirs.generate, ctx)
    trajectory = start_trajectory(Prompt(id="p", ordinal=5, messages=[USER]), 0, ctx)
    at = Conversation(trajectory, ours.generate, ctx, lambda line: None)

    async def converse():
        called = await ask(at, [USER], agent.tools)
        messages = [USER, called, {"role": "tool", "content": "12", "tool_call_id": called["tool_calls"][0]["id"]}]
        spoken = await ask(at, messages, agent.tools)
        await ask(at, [*messages, spoken, USER], agent.tools)

    asyncio.run(converse())
    for request, expected in zip(ours.requests, theirs.requests):
        np.testing.assert_array_equal(request.context_ids, expected.context_ids)
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, -1]
    last = tokenizer.decode(ours.requests[2].context_ids.tolist())
    assert "<|im_start|>assistant\nab<|im_end|>\n<|im_start|>user\nab?<|im_end|>" in last and "analysis" not in last


def test_an_answer_that_such_a_template_renders_as_sampled_is_continued():
    """An agent of a user, with a question after an answer."""
    tokenizer = tokenizer_of("hermes")
    ctx, policy = context(tokenizer), ScriptedPolicy(tokenizer, "ab", "12")
    trajectory = start_trajectory(Prompt(id="p", ordinal=5, messages=[USER]), 0, ctx)

    async def answered_twice():
        await take_turn(trajectory, render(tokenizer, [USER]), policy.generate, ctx)
        await take_turn(trajectory, next_context(trajectory, [USER], ctx), policy.generate, ctx)

    asyncio.run(answered_twice())
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]


def test_only_templates_that_render_results_after_calls_alone_get_calls():
    assert needs_calls(tokenizer_of("hermes"))
    assert require_tools_in_template(MultiTurn(tools=[F]), tokenizer_of("hermes"), [USER], "T") is None
    refuses = NEEDS_CALLS.replace("not ns.calls", "true")
    for template in (None, "{{ messages }}", refuses, NEEDS_CALLS.replace("raise_exception('no call')", "m.content")):
        assert not needs_calls(tiny_tokenizer(template))
    for template, case in (
        (refuses, "answer of a tool"),
        (
            NEEDS_CALLS.replace(
                "{% set ns.calls",
                "{% if m.tool_calls "
                "and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}{% set ns.calls",
            ),
            "two calls",
        ),
    ):
        with pytest.raises(ConfigError, match=f"can't render .*{case}"):
            require_tools_in_template(MultiTurn(tools=[F]), tiny_tokenizer(template), [USER], "T")
