"""Rows of public data sets in many layouts: each is rendered as it is meant, or refused with its place and a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from golden import cases, check_case
from tiny_tokenizers import CHATML, SHOWS_TOOLS, tiny_tokenizer

from meshrl.agent.loop import MultiTurn
from meshrl.config.data import DataConfig
from meshrl.config.loop import SftConfig
from meshrl.core.errors import ConfigError, DataError
from meshrl.data.datasets import PromptMaker, load_prompts, load_sft_rows
from meshrl.data.tables import RowTable
from meshrl.run.inputs import load_run, objects_of

CALLS = SHOWS_TOOLS.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}")
AS_IS = "{{ messages[0].content }}"
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"properties": {"a": {"type": "string"}}}}}


def prompts(rows, template=CHATML, agent_tools=None, **changes):
    tokenizer = tiny_tokenizer(template)
    make = PromptMaker(DataConfig(path="x", max_prompt_tokens=999, **changes), tokenizer, agent_tools)
    return [tokenizer.decode(p.ids.tolist()) for p in load_prompts(RowTable("data", rows), make)[0]]


def sft_texts(rows, template=CALLS, **changes):
    tokenizer, cfg = tiny_tokenizer(template), SftConfig(path="x", num_steps=1, **changes)
    table = rows if isinstance(rows, RowTable) else RowTable("data", rows)
    return [tokenizer.decode(row.ids.tolist()) for row in load_sft_rows(table, cfg, tokenizer, (2,))[0]]


def asked(content, role="user"):
    return [{"role": role, "content": content}]


PROMPTS = Path(__file__).parent / "golden" / "prompts.txt"


@pytest.mark.parametrize("given", [given for given, _ in cases(PROMPTS)])
def test_a_prompt_that_would_be_rendered_as_something_else_is_refused(given):
    """All of these were rendered without a word: an answer after an answer, a template within a template."""
    with pytest.raises(DataError) as error:
        prompts([{"question": json.loads(given), "answer": "4"}])
    check_case(PROMPTS, given, str(error.value))


@pytest.mark.parametrize(
    "question",
    [
        "What does [INST] mean in Llama 2's template, and <|im_start|> in ChatML?",
        'Sort [{"a": 2}, {"a": 1}] by a.',
        '[{"a": 2}, {"a": 1}]',
        '{"role": {"admin": 1}} is a policy. Which role may write?',
        "Write a dialogue that begins with User: hello",
        "<s>old price</s> is struck through. What does <s> mean?",
        [USER, ANSWER, USER],
        [USER, {"role": "tool", "content": "4"}],
    ],
)
def test_texts_and_conversations_that_look_similar_are_prompts(question):
    prompts([{"question": question, "answer": "4"}])


def test_a_rendered_prompt_is_used_as_it_is_with_a_template_that_adds_nothing():
    text = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompts([{"question": text, "answer": "4"}], AS_IS) == [text]


def test_a_role_that_the_template_names_is_one_of_its_own():
    template = "{% for m in messages %}{{ 'H:' if m.role == 'human' else 'A:' }}{{ m.content }}{% endfor %}"
    assert prompts([{"question": asked("2+2?", "human"), "answer": "4"}], template) == ["H:2+2?"]


def test_an_answer_that_has_begun_is_continued_with_continue_last():
    begun = {"role": "assistant", "content": "Let me think.\n<think>"}
    rows = [{"question": [USER, begun], "answer": "4"}, {"question": "3+3?", "answer": "6"}]
    continued, other = prompts(rows, continue_last=True, system="Be short.")
    assert continued.endswith("user\n2+2?<|im_end|>\n<|im_start|>assistant\nLet me think.\n<think>")
    assert continued.startswith("<|bos|><|im_start|>system\nBe short.")
    assert other.endswith("3+3?<|im_end|>\n<|im_start|>assistant\n")
    drops = CHATML.replace("{{ m.content }}", "{{ m.content.split('<think>')[0] }}")
    with pytest.raises(DataError, match=r"^data\[0\]: the chat template refused messages"):
        prompts(rows, drops, continue_last=True)
    config = {"model": {"path": "m"}, "data": {"path": "x", "continue_last": True}, "loop": {"num_steps": 1}}
    with pytest.raises(ConfigError, match=r"data\.continue_last = true[\s\S]*multi_turn begins a new message"):
        load_run(config | {"agent": {"kind": "multi_turn"}})


def call(**arguments):
    (name,) = arguments
    function = {"name": f"of_{name}", "arguments": arguments}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return {"messages": [USER, message, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "5"}]}


def test_keys_that_unified_columns_fill_with_null_are_not_trained(tmp_path):
    """Each call would be trained with the arguments of all other tools."""
    rows = [call(expression="2+3"), call(city="Rome"), call(where={"lat": 1})]
    rows.append({"messages": [USER, {"role": "assistant", "content": "5"}]})
    rows[0]["tools"], rows[1]["tools"] = [TOOL], [{**TOOL, "function": {"name": "of_city", "parameters": {}}}]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "rows.parquet")
    cfg, tokenizer = SftConfig(path="x", num_steps=1), tiny_tokenizer(CALLS)
    texts = sft_texts(rows)
    parquet, _ = load_sft_rows(tmp_path / "rows.parquet", cfg, tokenizer, (2,))
    assert [tokenizer.decode(row.ids.tolist()) for row in parquet] == texts
    assert sft_texts(objects_of(rows={"sft.path": dataset}).table("sft.path")) == texts
    (text,) = sft_texts([call(unit=None)])
    assert '"arguments": {"unit": null}' in text  # a null of the row itself


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]]])
def test_arguments_as_json_text_are_objects_and_the_tools_of_a_row_are_rendered(tools):
    row, as_text = call(expression="2+3"), call(expression="2+3")
    function = as_text["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    del as_text["messages"][1]["content"]  # or null, as OpenAI writes it
    shows = CALLS.replace("t.function.name", "(t.function or t).name")
    assert sft_texts([as_text | {"tools": tools}], shows) == ["calc\n" + sft_texts([row])[0]]
    assert sft_texts([as_text | {"tools": tools}], tools=None) == sft_texts([row])
    question = {"question": as_text["messages"][:3], "answer": "5", "tools": tools}
    assert prompts([question], shows)[0].startswith("calc\n<|bos|>")
    with pytest.raises(DataError, match=r"^data\[0\]: it has tools, but only the agent's can be called"):
        prompts([question], shows, MultiTurn().tools)
    assert prompts([question], CALLS, MultiTurn().tools, tools=None)[0].startswith("calculator\n")


@pytest.mark.parametrize(
    ("change", "template", "error"),
    [
        ({"tools": [TOOL]}, CHATML, "the chat template leaves out tool_calls and tools of column 'messages'"),
        ({}, CHATML, "the chat template leaves out tool_calls of"),
        ({"tools": "calc"}, CALLS, "column 'tools' is str \"calc\"; it should be a list"),
        ({"tools": [1]}, CALLS, "column 'tools' is list"),
        ({"messages": json.dumps([USER])}, CALLS, "is JSON text"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "a=1"}]}]}, CALLS, "tool call"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"arguments": {}}]}]}, CALLS, "tool call"),
        ({"messages": [USER, {**ANSWER, "tool_calls": 7}]}, CALLS, "tool call"),
        ({"messages": [USER, {**ANSWER, "thinking": "t"}]}, CALLS, "leaves out thinking"),
    ],
)
def test_what_supervised_training_would_lose_is_refused(change, template, error):
    with pytest.raises(DataError, match=rf"^data\[0\]: .*{error}"):
        sft_texts([call(a=1) | change], template)


def test_one_error_has_up_to_ten_bad_rows_and_their_number(tmp_path):
    rows = [{"question": f"{i}", "answer": None if i % 2 else "1"} for i in range(30)]
    with pytest.raises(DataError) as error:
        prompts(rows)
    lines = str(error.value).splitlines()
    assert lines[0] == "15 of the first 30 rows can't be used:" and lines[11] == "  and 5 more" and len(lines) == 12
    assert lines[1] == "  data[1]: column 'answer' is null; give the row an answer, or remove the row"
    with pytest.raises(DataError, match=r"^data\[0\]: .*remove the row$"):
        prompts([rows[1], rows[0]])
    for count in (1, 3):
        with pytest.raises(DataError, match=r"If no reward needs a ground truth, set data\.answer: null"):
            prompts([rows[1]] * count)
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n{"messages": 1}\n{\n')
    with pytest.raises(DataError, match=r"(?s)^3 of the first 3 rows.*jsonl:1: column.*jsonl:2: .*jsonl:3: not JSON"):
        load_sft_rows(tmp_path / "rows.jsonl", SftConfig(path="x", num_steps=1), tiny_tokenizer(), (2,))
