from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from scripted_agent import ScriptedEngine, scripted_context
from tiny_tokenizers import DROPS_THINKING, SHOWS_TOOLS, tiny_tokenizer

from meshrl.agent.flatten import TurnError, attach, flatten, path_ids
from meshrl.agent.loop import (
    MultiTurn,
    SingleTurn,
    next_context,
    prompt_ids,
    require_tools_in_template,
    start_trajectory,
    take_turn,
)
from meshrl.agent.resolve import resolve_agent
from meshrl.agent.tools import Tool
from meshrl.config.agent import AgentConfig
from meshrl.core.errors import ConfigError, DataError, Failure, RequestError
from meshrl.core.types import Media, Prompt, Request, SamplingParams, Turn, turn_seed
from meshrl.data.built_in_templates import BUILT_IN
from meshrl.data.chat import render

USER = {"role": "user", "content": "ab?"}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>'


class ScriptedPolicy:
    """A policy that samples the given texts with one token per character, unlike the tokenizer's encoding. stop_text: a
    turn that ends with this text has no stop token."""

    def __init__(self, tokenizer, *texts, stop_reason="stop", stop_id=None, stop_text=None):
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.stop_reason, self.stop_id = stop_reason, stop_id or tokenizer.eos_token_id
        self.stop_text = stop_text
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Turn:
        self.requests.append(request)
        text = self.texts[len(self.requests) - 1]
        letters = [self.tokenizer(c, add_special_tokens=False).input_ids for c in text]
        ids = [i for letter in letters for i in letter]
        if self.stop_reason == "stop" and not (self.stop_text and text.endswith(self.stop_text)):
            ids.append(self.stop_id)
        return Turn(
            context_ids=request.context_ids,
            output_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -1.5, np.float32),
            versions=np.full(len(ids), 3, np.int32),
            stop_reason=self.stop_reason,
            sampling=request.sampling,
            seed=request.seed,
        )


def context(tokenizer, **changes):
    sampling = SamplingParams(stop_token_ids=(2, 3))
    facts = dict(tokenizer=tokenizer, sampling=sampling, max_new_tokens=200, max_context_tokens=4000)
    return scripted_context(**{**facts, **changes})


def run(agent, generate, ctx, prompt=None, index=0):
    prompt = prompt or Prompt(id="p", ordinal=5, messages=[USER])
    return asyncio.run(agent.run(prompt, index, generate, ctx))


def test_a_single_turn_has_the_sampled_tokens_and_their_text():
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, "ab12")
    t = run(SingleTurn(), policy.generate, context(tokenizer, purpose="eval"), index=2)
    assert (t.status, t.purpose, t.group_id, t.index, t.reward) == ("done", "eval", "p-0", 2, None)
    (turn,) = t.turns
    assert turn.messages == [{"role": "assistant", "content": "ab12"}]  # without the end token
    np.testing.assert_array_equal(turn.context_ids, render(tokenizer, [USER]))
    assert turn.parent == -1
    assert not turn.output_ids.flags.writeable
    request = policy.requests[0]
    assert (request.session, request.max_new_tokens) == ("p-0", 200)


def test_ids_that_data_rendered_are_sent_unchanged():
    """A prompt is rendered once."""
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, "ab")
    odd = np.array([9, 9, 9], np.int32)
    run(SingleTurn(), policy.generate, context(tokenizer), Prompt(id="p", ordinal=0, messages=[USER], ids=odd))
    assert policy.requests[0].context_ids.tolist() == [9, 9, 9]


def test_sampled_ids_that_no_tokenizer_would_choose_are_trained_to_the_bit():
    """The tokenizer has one token each for "ab" and "12", this policy two each, in two turns."""
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, CALL + "ab", "12")
    t = run(MultiTurn(), policy.generate, context(tokenizer))
    t.reward = 1.0
    (sample,), _ = flatten([t])
    expected = [*(tokenizer(c, add_special_tokens=False).input_ids[0] for c in CALL + "ab"), 2]
    expected += [*(tokenizer(c, add_special_tokens=False).input_ids[0] for c in "12"), 2]
    assert sample.tokens[sample.mask].tolist() == expected
    canonical = tokenizer(tokenizer.decode(sample.tokens.tolist()), add_special_tokens=False).input_ids
    assert len(canonical) < len(sample.tokens)  # encoding the text again would give other ids


def test_a_tool_turn_appends_the_templates_tokens_to_the_sampled_ones():
    """The second context begins with the ids and the output of the first turn, then has the template's tokens."""
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, CALL, "12")
    t = run(MultiTurn(), policy.generate, context(tokenizer))
    assert [turn.parent for turn in t.turns] == [-1, 0]
    assert tokenizer.decode(t.turns[1].context_ids.tolist()) == (
        "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"
    )
    np.testing.assert_array_equal(policy.requests[1].context_ids[: -len(t.turns[1].context_ids)], path_ids(t.turns, 0))
    assert t.turns[1].messages == [{"role": "tool", "content": "12"}, {"role": "assistant", "content": "12"}]
    assert t.status == "done"
    history = [USER, *t.turns[0].messages, *t.turns[1].messages]
    assert tokenizer.decode(path_ids(t.turns, 1).tolist()) + "\n" == tokenizer.decode(
        render(tokenizer, history, add_generation_prompt=False).tolist()
    )


def test_a_turn_that_ended_with_another_stop_id_is_continued_after_it():
    """Several EOS ids; the sampled one stays, although the template would have written another."""
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, CALL, "12", stop_id=3)
    t = run(MultiTurn(), policy.generate, context(tokenizer))
    assert [turn.parent for turn in t.turns] == [-1, 0]
    assert t.turns[0].output_ids[-1] == 3
    assert t.turns[1].context_ids[0] == tokenizer("\n", add_special_tokens=False).input_ids[0]


def test_after_a_stop_string_the_template_ends_the_turn_with_untrained_tokens():
    """The string is sampled and trained; the end of turn was not sampled, and is context of the next turn."""
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, CALL, "12", stop_text="</tool_call>")
    t = run(MultiTurn(), policy.generate, context(tokenizer))
    assert [turn.parent for turn in t.turns] == [-1, 0]
    assert t.turns[0].messages[-1]["content"] == CALL  # an agent reads the stop string
    assert tokenizer.decode(t.turns[1].context_ids.tolist()) == (
        "<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"
    )
    t.reward = 1.0
    (sample,), _ = flatten([t])
    assert tokenizer.decode(sample.tokens[sample.mask].tolist()) == CALL + "12<|im_end|>"
    again = run(MultiTurn(), ScriptedPolicy(tokenizer, CALL, "12").generate, context(tokenizer))
    np.testing.assert_array_equal(path_ids(t.turns, 1), path_ids(again.turns, 1))  # as if it had sampled the end


def test_a_template_that_rewrites_history_starts_a_new_row_and_trains_both():
    """The template drops earlier thinking; both rows train sampled tokens, each with the context it had."""
    tokenizer = tiny_tokenizer(DROPS_THINKING)
    policy = ScriptedPolicy(tokenizer, f"<think>ab</think>{CALL}", "12")
    t = run(MultiTurn(), policy.generate, context(tokenizer))
    assert [turn.parent for turn in t.turns] == [-1, -1]
    seen = tokenizer.decode(policy.requests[1].context_ids.tolist())
    assert "<think>" not in seen and CALL in seen
    t.reward = 1.0
    samples, _ = flatten([t])
    assert [tokenizer.decode(s.tokens[s.mask].tolist()) for s in samples] == [
        f"<think>ab</think>{CALL}<|im_end|>",
        "12<|im_end|>",
    ]


def test_the_same_template_appends_where_it_leaves_history_alone():
    tokenizer = tiny_tokenizer(DROPS_THINKING)
    t = run(MultiTurn(), ScriptedPolicy(tokenizer, CALL, "12").generate, context(tokenizer))
    assert [turn.parent for turn in t.turns] == [-1, 0]


def test_seeds_follow_run_ordinal_index_and_context_and_nothing_else():
    tokenizer = tiny_tokenizer()
    seeds = {}
    for index, group in ((0, "a"), (1, "a"), (0, "b")):
        policy = ScriptedPolicy(tokenizer, CALL, "12")
        ctx = context(tokenizer, group_id=group, run_seed=9, min_version=index)
        run(MultiTurn(), policy.generate, ctx, index=index)
        seeds[index, group] = [r.seed for r in policy.requests]
    assert seeds[0, "a"] == seeds[0, "b"] and len({*seeds[0, "a"], *seeds[1, "a"]}) == 4


def test_the_first_answer_at_a_rendered_prompt_has_the_seed_of_its_attempt():
    policy, tokenizer = ScriptedPolicy(tiny_tokenizer(), "12"), tiny_tokenizer()
    prompt = Prompt(id="p", ordinal=5, messages=[USER], ids=render(tokenizer, [USER]))
    run(SingleTurn(), policy.generate, context(tokenizer, run_seed=9), prompt, index=3)
    assert policy.requests[0].seed == turn_seed(9, 5, 3, 0)


def test_a_turn_cut_at_its_length_is_truncated_and_calls_no_tool():
    tokenizer = tiny_tokenizer()
    for reason in ("length", "context"):
        t = run(MultiTurn(), ScriptedPolicy(tokenizer, CALL, stop_reason=reason).generate, context(tokenizer))
        assert (t.status, len(t.turns)) == ("truncated", 1)


def test_an_agent_that_never_stops_calling_is_truncated():
    tokenizer = tiny_tokenizer()
    t = run(MultiTurn(max_turns=3), ScriptedPolicy(tokenizer, *[CALL] * 3).generate, context(tokenizer))
    assert (t.status, len(t.turns)) == ("truncated", 3)


def test_a_conversation_that_fills_the_context_is_truncated_with_its_turns_kept():
    tokenizer = tiny_tokenizer()
    room = len(render(tokenizer, [USER])) + len(CALL) + 5
    policy = ScriptedPolicy(tokenizer, CALL, "12")
    t = run(MultiTurn(), policy.generate, context(tokenizer, max_context_tokens=room))
    assert (t.status, t.failure, len(t.turns)) == ("truncated", None, 1)
    assert policy.requests[0].max_new_tokens == len(CALL) + 5


def test_a_prompt_that_fills_the_context_fails_with_a_reason():
    tokenizer = tiny_tokenizer()
    t = run(SingleTurn(), ScriptedPolicy(tokenizer, "a").generate, context(tokenizer, max_context_tokens=10))
    assert (t.status, t.turns, t.failure.kind) == ("failed", [], "agent")
    assert "context of 10" in t.failure.message


def test_a_refused_request_is_a_typed_failure():
    async def refuse(request):
        raise RequestError("too long")

    t = run(SingleTurn(), refuse, context(tiny_tokenizer()))
    assert (t.status, t.failure) == ("failed", Failure(kind="engine", message="too long"))


def test_a_turn_that_the_engine_ended_is_a_typed_failure():
    tokenizer = tiny_tokenizer()
    t = run(SingleTurn(), ScriptedPolicy(tokenizer, "a", stop_reason="abort").generate, context(tokenizer))
    assert (t.status, t.failure.kind) == ("failed", "engine")
    assert "'abort'" in t.failure.message


def test_other_errors_of_the_engine_propagate():
    async def crash(request):
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        run(SingleTurn(), crash, context(tiny_tokenizer()))


def test_an_engine_that_changes_the_context_is_caught():
    """An engine that encodes a string again returns a second BOS."""
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, "ab")

    async def doubled(request):
        turn = await policy.generate(request)
        return dataclasses.replace(turn, context_ids=np.append(turn.context_ids[:1], turn.context_ids))

    with pytest.raises(TurnError, match="ids must stay unchanged"):
        run(SingleTurn(), doubled, context(tokenizer))


def test_media_are_an_error_for_a_model_of_text():
    cat = Media(kind="image", digest="d", source="cat.png", outputs={}, num_tokens=1)
    prompt = Prompt(id="p", ordinal=0, messages=[USER], media={"cat": cat})
    with pytest.raises(DataError, match=r"set data\.chat_template to one of a model with images"):
        run(SingleTurn(), ScriptedEngine().generate, context(tiny_tokenizer()), prompt)


def test_malformed_and_unknown_calls_are_answered_and_not_fatal():
    tokenizer = tiny_tokenizer()
    texts = ["<tool_call>{</tool_call>", '<tool_call>{"name": "web", "arguments": {}}</tool_call>', "12"]
    t = run(MultiTurn(), ScriptedPolicy(tokenizer, *texts).generate, context(tokenizer))
    answers = [turn.messages[0]["content"] for turn in t.turns[1:]]
    assert answers[0].startswith("error: the tool call is not valid JSON")
    assert answers[1] == "error: no tool is called 'web'; there are: calculator"
    assert t.status == "done"


def test_a_context_finds_the_longest_turn_it_continues():
    def turn(parent, context, output):
        arrays = dict(logprobs=np.zeros(len(output), np.float32), versions=np.zeros(len(output), np.int32))
        ids = dict(context_ids=np.array(context, np.int32), output_ids=np.array(output, np.int32))
        return Turn(parent=parent, stop_reason="stop", **ids, **arrays)

    turns = [turn(-1, [1, 2], [3]), turn(0, [4], [5]), turn(-1, [9], [9]), turn(-1, [1], [2])]
    for ids, expected in [
        ([1, 2, 3, 4, 5, 6], 1),
        ([1, 2, 3, 4, 5], 1),
        ([1, 2, 3, 4, 6], 0),
        ([1, 2, 4], 3),
        ([1, 3], -1),
        ([9, 9, 1], 2),
        ([], -1),
    ]:
        assert attach(turns, np.array(ids, np.int32)) == expected


DOUBLE = Tool(
    name="double",
    description="",
    parameters={"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    function=lambda x: str(2 * x),
)


def test_an_agent_is_built_from_its_name_or_a_dotted_path():
    assert isinstance(resolve_agent(AgentConfig()), SingleTurn)
    multi = resolve_agent(AgentConfig(kind="multi_turn", args={"max_turns": 2, "tools": [f"{__name__}:DOUBLE"]}))
    assert isinstance(multi, MultiTurn)
    assert [t["function"]["name"] for t in multi.tools] == ["double"]
    assert isinstance(resolve_agent(AgentConfig(kind="meshrl.agent.loop:SingleTurn")), SingleTurn)


def not_async(prompt, index, generate, ctx): ...


class Without:
    async def run(self, prompt, index, generate, ctx): ...


class Blocking(SingleTurn):
    def run(self, prompt, index, generate, ctx): ...


class NoTools(SingleTurn):
    def __init__(self):
        self.tools = None


class OfTools(SingleTurn):
    def __init__(self):
        self.tools = [DOUBLE]


async def answer_twice(prompt, index, generate, ctx, ask):
    """An agent of a user: it asks once more."""
    trajectory = start_trajectory(prompt, index, ctx)
    if await take_turn(trajectory, prompt_ids(prompt, ctx.tokenizer, []), generate, ctx):
        question = [{"role": "user", "content": ask}]
        await take_turn(trajectory, next_context(trajectory, question, ctx), generate, ctx, question)
    return trajectory


@pytest.mark.parametrize("first_is_cut", [False, True])
def test_an_async_function_with_args_is_an_agent_that_continues_its_conversation(first_is_cut):
    """A first answer without a stop token is ended by the template, as context."""
    agent = resolve_agent(AgentConfig(kind=f"{__name__}:answer_twice", args={"ask": "1?"}))
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, "ab", "12", stop_text="ab" if first_is_cut else None)
    t = run(agent, policy.generate, context(tokenizer))
    assert (agent.tools, t.status, [turn.parent for turn in t.turns]) == ([], "done", [-1, 0])
    end = "<|im_end|>" if first_is_cut else ""
    assert tokenizer.decode(t.turns[1].context_ids.tolist()) == (
        f"{end}\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert t.turns[1].messages == [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "12"}]


def test_a_conversation_needs_messages():
    prompt = Prompt(id="p", ordinal=0, ids=np.array([5], np.int32))
    tokenizer = tiny_tokenizer()
    agent = resolve_agent(AgentConfig(kind=f"{__name__}:answer_twice", args={"ask": "1?"}))
    with pytest.raises(DataError, match="prompt 'p' has no messages"):
        run(agent, ScriptedPolicy(tokenizer, "ab").generate, context(tokenizer), prompt)


def half(x: float) -> float:
    """Halves a number.

    Args:
        x: the number
    """
    return x / 2


@pytest.mark.parametrize("given", [f"{__name__}:half", half], ids=["path", "function"])
def test_a_plain_function_is_called_as_a_tool_of_a_conversation(given):
    agent = MultiTurn(tools=[given])
    assert agent.tools[0]["function"]["parameters"]["properties"] == {
        "x": {"type": "number", "description": "the number"}
    }
    tokenizer = tiny_tokenizer()
    policy = ScriptedPolicy(tokenizer, '<tool_call>{"name": "half", "arguments": {"x": 3}}</tool_call>', "12")
    t = run(agent, policy.generate, context(tokenizer))
    assert t.turns[1].messages[0] == {"role": "tool", "content": "1.5"}


def test_a_template_that_ignores_tools_is_refused():
    with pytest.raises(ConfigError, match=r"the template of a test: .*same text with and without .*calculator"):
        require_tools_in_template(MultiTurn(), tiny_tokenizer(), [USER], "the template of a test")
    require_tools_in_template(SingleTurn(), tiny_tokenizer(), [USER], "")
    assert "renders no `tool_calls`" in require_tools_in_template(MultiTurn(), tiny_tokenizer(SHOWS_TOOLS), [USER], "")
    assert require_tools_in_template(MultiTurn(), tiny_tokenizer(BUILT_IN["chatml_tools"]), [USER], "") is None


@pytest.mark.parametrize(
    ("form", "is_read"),
    [
        ('<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>', True),
        (
            '<tool_call>{"name": "{{ f.name }}", "arguments": {{ "" + f.arguments }}}</tool_call>',
            True,
        ),  # of a JSON text
        ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', False),
        ("<tool_call><function={{ f.name }}>{{ f.arguments.stand_in }}</function></tool_call>", False),
        ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", False),
        ('<tool_call>{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}</tool_call>', False),
    ],
)
def test_a_template_whose_calls_are_not_read_is_refused(form, is_read):
    calls = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + form + "{% endfor %}"
    tokenizer = tiny_tokenizer(SHOWS_TOOLS.replace("{{ m.content }}", "{{ m.content }}" + calls))
    if is_read:
        assert require_tools_in_template(MultiTurn(), tokenizer, [USER], "T") is None
    else:
        with pytest.raises(
            ConfigError, match=r"T: it writes a call as .*stand-in argument.*'hermes' does not read.*chatml_tools"
        ):
            require_tools_in_template(MultiTurn(), tokenizer, [USER], "T")


@pytest.mark.parametrize(
    ("condition", "max_turns", "refused"),
    [
        (
            "ns.answers > 1 and loop.previtem.role != 'tool'",
            3,
            "the answer to a second call",
        ),  # as templates that want other roles in turn
        ("ns.answers > 1 and loop.previtem.role == 'tool'", 4, "two calls in one answer"),
        ("ns.answers > 1 and loop.previtem.role != 'tool'", 2, None),
        ("ns.answers > 2", 4, None),
    ],
)
def test_a_template_that_refuses_a_context_of_the_run_is_refused_at_the_start(condition, max_turns, refused):
    count = (
        "{% if m.role == 'tool' %}{% set ns.answers = ns.answers + 1 %}{% if "
        + condition
        + " %}{{ raise_exception('not these roles') }}{% endif %}{% endif %}"
    )
    template = "{% set ns = namespace(answers=0) %}" + SHOWS_TOOLS.replace(
        "{% for m in messages %}", "{% for m in messages %}" + count
    )
    agent = MultiTurn(max_turns=max_turns)
    if refused is None:
        require_tools_in_template(agent, tiny_tokenizer(template), [USER], "T")
    else:
        with pytest.raises(ConfigError, match=rf"T: it can't render {refused}: .*not these roles"):
            require_tools_in_template(agent, tiny_tokenizer(template), [USER], "T")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}", "no tools here"),
        ("{% if m.role == 'tool' %}{% continue %}{% endif %}", "leaves out messages of the role tool"),
    ],
)
def test_a_template_without_answers_of_tools_is_refused_for_a_conversation(changed, expected):
    template = SHOWS_TOOLS.replace("{% for m in messages %}", "{% for m in messages %}" + changed)
    with pytest.raises(ConfigError, match=f"the template of a test: .*{expected}"):
        require_tools_in_template(MultiTurn(), tiny_tokenizer(template), [USER], "the template of a test")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            {"kind": "singel_turn"},
            r"agent\.kind is 'singel_turn'; allowed: single_turn, .*mean 'single_turn'",
        ),
        ({"kind": "no.such:thing"}, "importing 'no.such' raised ModuleNotFoundError"),
        ({"kind": "meshrl.agent.loop:SingelTurn"}, r"has no 'SingelTurn'; did you mean 'SingleTurn'"),
        ({"kind": "single_turn", "args": {"max_turns": 2}}, "don't fit agent.kind 'single_turn': .*allowed: none$"),
        ({"kind": "multi_turn", "args": {"tool": []}}, "don't fit .*'tool'; allowed: .*tools.*max_turns"),
        ({"kind": "multi_turn", "args": {"max_turns": 0}}, "max_turns is 0"),
        ({"kind": "multi_turn", "args": {"tools": "calculator"}}, "must be a list of names"),
        ({"kind": "multi_turn", "args": {"tools": ["calculater"]}}, "mean 'calculator'"),
        ({"kind": "multi_turn", "args": {"tools": ["math:sqrt"]}}, "'sqrt' is no tool: its parameters"),
        ({"kind": "multi_turn", "args": {"tools": ["math:pi"]}}, "a tool is float 3.14.*; it must be a function"),
        ({"kind": "multi_turn", "args": {"tools": ["calculator", "calculator"]}}, "two tools are named 'calculator'"),
        ({"kind": "multi_turn", "args": {"tools": []}}, "is empty"),
        ({"kind": f"{__name__}:DOUBLE"}, "is Tool Tool.*; it must be a class or an async function"),
        ({"kind": f"{__name__}:not_async"}, "don't fit .*missing a required argument: 'prompt'; .*async def"),
        (
            {"kind": f"{__name__}:answer_twice", "args": {"ask": "?", "often": 2}},
            "don't fit .*argument 'often'; allowed: ask$",
        ),
        ({"kind": f"{__name__}:Without"}, "is Without .*; it must be an object with the method `run` and the list"),
        ({"kind": f"{__name__}:Blocking"}, "its method `run` must be defined with `async def`"),
        ({"kind": f"{__name__}:NoTools"}, "its `tools` are NoneType None; they must be a list .* empty for an agent"),
        ({"kind": f"{__name__}:OfTools"}, r"its `tools` are list \[Tool\(.*list of JSON schemas, such as Tool.schema"),
    ],
)
def test_an_agent_that_can_not_be_built_is_a_config_error(facts, expected):
    with pytest.raises(ConfigError, match=expected):
        resolve_agent(AgentConfig(**facts))
