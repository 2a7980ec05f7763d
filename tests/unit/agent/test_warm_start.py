"""SFT of conversations with calls is the warm start of RL with the same tools: both have the same tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_agents import USER, ScriptedPolicy, context, run
from tiny_tokenizers import tiny_tokenizer

from meshrl.agent.flatten import flatten
from meshrl.agent.loop import MultiTurn
from meshrl.config.loop import SftConfig
from meshrl.data.built_in_templates import BUILT_IN
from meshrl.data.datasets import load_sft_rows
from meshrl.data.tables import RowTable

ARGUMENTS = {"expression": "3*4"}
ONE = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "calculator", "arguments": arguments}}


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
@pytest.mark.parametrize(("content", "num_calls"), [("", 1), ("I add.", 1), ("", 2)])
def test_a_row_with_tools_and_calls_has_the_tokens_of_the_same_conversation_in_rl(
    arguments: Any, content: str, num_calls: int
):
    tokenizer, agent = tiny_tokenizer(BUILT_IN["chatml_tools"]), MultiTurn(tools=["calculator"])
    answers = [{"role": "tool", "content": "12"}] * num_calls
    called = {"role": "assistant", "content": content, "tool_calls": [call(arguments)] * num_calls}
    row = {"messages": [USER, called, *answers, {"role": "assistant", "content": "ab"}], "tools": agent.tools}
    cfg = SftConfig(path="rows.jsonl", max_row_tokens=4000, num_steps=1)
    ((trained,), left_out) = load_sft_rows(RowTable("data", [row]), cfg, tokenizer, (2,))
    texts = "\n".join([content] * bool(content) + [ONE] * num_calls)
    t = run(agent, ScriptedPolicy(tokenizer, texts, "ab").generate, context(tokenizer))
    assert [turn.parent for turn in t.turns] == [-1, 0] and left_out == 0
    t.reward = 1.0
    (sample,), _ = flatten([t])
    expected = trained.sample("p")
    assert tokenizer.decode(sample.tokens.tolist()) == tokenizer.decode(expected.tokens.tolist())
    for masked in (sample.mask, ~sample.mask):
        same = expected.mask if masked is sample.mask else ~expected.mask
        assert tokenizer.decode(sample.tokens[masked].tolist()) == tokenizer.decode(expected.tokens[same].tolist())
