"""Reasoning, content and calls of an answer, in each format of the table."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import tiny_tokenizer

from meshrl.agent import parsing
from meshrl.agent.parsing import FORMATS, ParsedAnswer, ToolCall, format_name, parse
from meshrl.core.errors import DataError
from meshrl.data.built_in_templates import BUILT_IN

TYPES = {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}}
ARGUMENTS = {"s": 'it\'s "7"', "n": 7, "o": {"a": [1, True]}}
AS_JSON = json.dumps(ARGUMENTS)
XML = "".join(
    f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in ARGUMENTS.items()
)
GLM = "".join(
    f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>\n"
    for k, v in ARGUMENTS.items()
)
PYTHON = f"s='it\\'s \"7\"', n=7, o={json.dumps(ARGUMENTS['o'])}"

# format -> (reasoning around R, a call of f, a call of g without arguments, a malformed call, how a call is closed)
WRITTEN: dict[str, tuple[str, str, str, str, str]] = {
    "hermes": (
        "<think>\nR\n</think>\n\n",
        f'<tool_call>\n{{"name": "f", "arguments": {AS_JSON}}}\n</tool_call>',
        '<tool_call>{"name": "g"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"s": }}</tool_call>',
        "</tool_call>",
    ),
    "xml": (
        "<think>\nR\n</think>\n\n",
        f"<tool_call>\n<function=f>\n{XML}</function>\n</tool_call>",
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        "</tool_call>",
    ),
    "glm": (
        "\n<think>R</think>\n",
        f"<tool_call>f\n{GLM}</tool_call>",
        "<tool_call>g\n</tool_call>",
        "<tool_call></tool_call>",
        "</tool_call>",
    ),
    "gemma4": (
        "<|channel>thought\nR\n<channel|>",
        '<|tool_call>call:f{n:7,o:{a:[1,true]},s:<|"|>it\'s "7"<|"|>}<tool_call|>',
        "<|tool_call>call:g{}<tool_call|>",
        "<|tool_call>call:f{n:}<tool_call|>",
        "<tool_call|>",
    ),
    "lfm2": (
        "<think>R</think>",
        f"<|tool_call_start|>[f({PYTHON})]<|tool_call_end|>",
        "<|tool_call_start|>[g()]<|tool_call_end|>",
        "<|tool_call_start|>[f(n=]<|tool_call_end|>",
        "<|tool_call_end|>",
    ),
    "deepseek": (
        "<think>\nR\n</think>\n",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{AS_JSON}\n```<｜tool▁call▁end｜>",
        "\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{'n'}<｜tool▁call▁end｜>",
        "<｜tool▁call▁end｜>",
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>R<|end|>",
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{AS_JSON}<|call|>",
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{n: 1}<|call|>",
        "<|call|>",
    ),
    "llama3": (
        "",
        f'{{"name": "f", "parameters": {AS_JSON}}}',
        '; {"type": "function", "name": "g", "parameters": {}}',
        '; {"name": "f", "parameters": {"n": 07}}',
        "}",
    ),
}
FORMAT = pytest.mark.parametrize("name", WRITTEN)


def tokenizer_of(name: str, template: str = "") -> Any:
    return tiny_tokenizer("{{ messages }}" + " ".join(FORMATS[name].marks) + template)


def read(name: str, answer: str, **more: Any) -> ParsedAnswer:
    return parse(tokenizer_of(name), answer, **{"tools": [TOOL], **more})


def named(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(c.name, c.error or json.loads(c.arguments)) for c in answer.tool_calls]


def test_every_format_is_tested_and_detected_by_its_marks():
    assert WRITTEN.keys() == FORMATS.keys()
    assert {name: format_name(tokenizer_of(name)) for name in FORMATS} == {name: name for name in FORMATS}
    assert format_name(tiny_tokenizer()) == format_name(tiny_tokenizer(None)) == "hermes"
    assert format_name(tiny_tokenizer(BUILT_IN["chatml_tools"])) == "hermes"
    several = tiny_tokenizer()
    several.chat_template = {"default": "{{ messages }}", "tool_use": "<function=f><parameter=x> <tool_call>"}
    assert format_name(several) == "xml"


@FORMAT
def test_calls_are_read_in_order_with_the_types_of_their_tool(name: str):
    reasoning, first, second, *_ = WRITTEN[name]
    got = read(name, reasoning + first + second)
    assert named(got) == [("f", ARGUMENTS), ("g", {})]
    assert (got.reasoning_content, got.content) == ("R" if reasoning else "", "")


@FORMAT
def test_one_malformed_call_is_an_error_and_loses_no_other(name: str):
    reasoning, first, second, malformed, _ = WRITTEN[name]
    got = read(name, reasoning + first + malformed + second)
    assert named(got)[::2] == [("f", ARGUMENTS), ("g", {})]
    error = got.tool_calls[1]
    assert "tool call" in error.error and error.arguments in malformed and len(error.arguments) >= len("<tool_call>")


@FORMAT
def test_a_call_that_is_not_closed_is_text(name: str):
    _, first, _, _, close = WRITTEN[name]
    for cut in (first[: first.rindex(close)], first[: first.rindex(close)] + close[:-1]):
        got = read(name, "a" * (name != "llama3") + cut)
        if name == "llama3":  # has no token that closes a call, so its JSON decides
            assert got.tool_calls == () or "not valid JSON" in got.tool_calls[0].error
        else:
            assert got.tool_calls == () and cut.removeprefix("<｜tool▁calls▁begin｜>") in got.content


@FORMAT
def test_a_call_in_the_reasoning_is_not_executed(name: str):
    reasoning, first, *_ = WRITTEN[name]
    if not reasoning:
        return
    before, after = reasoning.split("R")
    got = read(name, f"{before}I write {first.replace('<|end|>', '')}{after}ab")
    assert got.tool_calls == () and got.content == "ab" and "7" in got.reasoning_content


@FORMAT
def test_text_that_arrives_in_pieces_is_read_alike(name: str, monkeypatch: pytest.MonkeyPatch):
    """The parser gets a long answer in several pieces."""
    reasoning, first, second, malformed, close = WRITTEN[name]
    answers = [reasoning + first + malformed + second, first[: -len(close)], "ab\n" + first + "\nab", reasoning + "ab"]
    expected = [read(name, answer) for answer in answers]
    for size in (1, 2, 5, 11):
        monkeypatch.setattr(parsing, "_FED_CHARS", size)
        assert [read(name, answer) for answer in answers] == expected


def test_a_degenerate_answer_takes_no_quadratic_time(monkeypatch: pytest.MonkeyPatch):
    def cpu_s(count: int) -> float:
        start = time.process_time()
        assert len(read("gpt_oss", WRITTEN["gpt_oss"][2] * count).tool_calls) == count
        return time.process_time() - start

    assert cpu_s(1200) < 8 * min(cpu_s(300), cpu_s(300))


def test_text_around_calls_stays_in_the_content():
    got = read("hermes", 'I add <tool_call>{"name": "f"}</tool_call>, then <tool_call>{"name": "g"}</tool_call>.\n')
    assert got.content == "I add , then ." and [c.name for c in got.tool_calls] == ["f", "g"]
    got = read("gpt_oss", "<|channel|>commentary<|message|>I add.<|end|>" + WRITTEN["gpt_oss"][1])
    assert got.content == "I add." and [c.name for c in got.tool_calls] == ["f"]
    got = read(
        "gpt_oss", "<|channel|>analysis<|message|>R<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>"
    )
    assert got == ParsedAnswer("7", "R", ())


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "age": 3}', 'The call is {"name": "f", "parameters": {}}', '[{"name": "f"}]']
)
def test_json_that_is_no_call_of_llama_is_text(text: str):
    assert read("llama3", text) == ParsedAnswer(text, "", ())


def test_a_plain_answer_stays_as_it_is_without_its_end():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("  ab \n", add_special_tokens=False).input_ids
    assert parse(tokenizer, np.array([*ids, 2, 3], np.int32), tools=[TOOL]).content == "  ab \n"
    stops = [tokenizer.convert_tokens_to_ids("<|im_start|>"), ids[0]]
    assert parse(tokenizer, np.array([*ids, stops[0]], np.int32), stop_ids=stops).content == "  ab \n"
    assert parse(tokenizer, "a<|im_end|>b<|im_end|>").content == "a<|im_end|>b"
    assert parse(tokenizer, "").content == ""


@pytest.mark.parametrize("name", ["hermes", "xml", "deepseek", "gemma4", "glm"])
def test_reasoning_that_the_prompt_begins_is_reasoning(name: str):
    before, after = WRITTEN[name][0].split("R")
    tokenizer, opened = tokenizer_of(name), "user ab " + before
    for context in (opened, tokenizer(opened, add_special_tokens=False, return_tensors="np").input_ids[0]):
        context = context if isinstance(context, str) else context.astype(np.int32)
        assert parse(tokenizer, f"R{after}ab", context=context) == ParsedAnswer("ab", "R", ())
        assert parse(tokenizer, "R is cut", context=context) == ParsedAnswer("", "R is cut", ())
    closed = parse(tokenizer, "ab", context=opened + "R" + after)
    assert closed == ParsedAnswer("ab", "", ())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{", "not valid JSON: Expecting"),
        ("[" * 100_000, "not valid JSON"),
        (r'{"name": "a", "arguments": {"x": "\ud83d"}}', "not valid JSON"),
        ('{"name": "a", "arguments": {"x": NaN}}', "not valid JSON"),
        ('{"name": "a", "arguments": {"x": ' + "1" * 5000 + "}}", "not valid JSON"),
        ("[]", 'must be a JSON object with a "name"'),
        ("7", 'must be a JSON object with a "name"'),
        ('"f"', 'must be a JSON object with a "name"'),
        ('{"name": 3}', 'must be a JSON object with a "name"'),
        ('{"name": "a", "arguments": [1]}', '"arguments" must be a JSON object'),
        ('{"name": "a", "arguments": "{}"}', '"arguments" must be a JSON object'),
        ('{"name": "a", "parameters": {"x": 1}}', ""),
    ],
)
def test_what_is_wrong_with_a_call_is_stated(body: str, expected: str):
    (call,) = read("hermes", f"<tool_call>{body}</tool_call>").tool_calls
    assert expected in call.error and bool(expected) == bool(call.error)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("[f(n=1), 7, f(2), g(n=[true, null, {}])]", [{"n": 1}, None, None, {"n": [True, None, {}]}]),
        ("f(n=1)", [{"n": 1}]),
        ("[f(s='a\nb'), g(n=1)]", [{"s": "a\nb"}, {"n": 1}]),
        ("[f(n=open('x'))]", [None]),
        ("[f(**{'n': 1})]", [None]),
        ("[f(n={1})]", [None]),
        ("[]", []),
    ],
)
def test_only_calls_with_literals_by_name_are_read_from_python(body: str, expected: list[Any]):
    calls = read("lfm2", f"<|tool_call_start|>{body}<|tool_call_end|>").tool_calls
    assert [None if c.error else json.loads(c.arguments) for c in calls] == expected


def test_values_are_typed_by_the_tool_only_where_the_format_has_no_types():
    answer = "<tool_call><function=f><parameter=s>7</parameter><parameter=n>7</parameter></function></tool_call>"
    assert named(read("xml", answer)) == [("f", {"s": "7", "n": 7})]
    assert named(read("hermes", '<tool_call>{"name": "f", "arguments": {"n": "7"}}</tool_call>')) == [("f", {"n": "7"})]


def test_without_tools_nothing_is_a_call():
    text = WRITTEN["hermes"][1]
    assert read("hermes", text, tools=()) == ParsedAnswer(text, "", ())


def test_ids_follow_context_answer_and_number():
    two = WRITTEN["hermes"][2] * 2
    ids = [[c.id for c in read("hermes", two, context=context).tool_calls] for context in ("a", "a", "b")]
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4
    assert all(len(i) == 9 and i.isalnum() for i in ids[0])


OWN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": ["[THINK]", "[THINKING]"], "close": "[/THINK]"},
        "tool_calls": {
            "open": "[CALLS]",
            "close_pattern": r"\[/CALLS\]\s*|$",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{args}"}},
            "transform_each": True,
        },
        "content": {"close": "<|im_end|>"},
    },
}


def test_a_tokenizers_own_response_template_comes_first():
    tokenizer = tokenizer_of("hermes")
    tokenizer.response_template = OWN
    calls = '[CALLS][{"tool": "f", "args": {"n": 1}}, {"tool": "g", "args": 3}][/CALLS]'
    got = parse(tokenizer, f"R[/THINK]ab {calls} <tool_call>", context="<|im_start|>assistant\n[THINK]", tools=[TOOL])
    assert (got.reasoning_content, got.content) == ("R", "ab <tool_call>")
    assert [(c.name, bool(c.error)) for c in got.tool_calls] == [("f", False), ("g", True)]
    assert parse(tokenizer, calls[:-8], tools=[TOOL]).tool_calls == ()
    tokenizer.response_template = {"fields": {"content": {"closes": "x"}}}
    with pytest.raises(DataError, match=r"response_template of '.*' is invalid: .*start_anchor"):
        parse(tokenizer, "ab")
    tokenizer.response_template = "x"
    with pytest.raises(DataError, match=r"response_template of '.*' is invalid: .*must be a dict"):
        parse(tokenizer, "ab")


def test_a_call_is_a_record():
    (call,) = read("hermes", WRITTEN["hermes"][2]).tool_calls
    assert call == ToolCall(call.id, "g", "{}")
