"""The tool `python`, whose programs run in isolation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_agents import ScriptedPolicy, context, run
from tiny_tokenizers import tiny_tokenizer

from meshrl.agent.loop import MultiTurn
from meshrl.core.errors import ConfigError


def answers(agent: MultiTurn, *codes: str) -> list[str]:
    tokenizer = tiny_tokenizer()
    calls = [json.dumps({"name": "python", "arguments": {"code": code}}) for code in codes]
    policy = ScriptedPolicy(tokenizer, "".join(f"<tool_call>{call}</tool_call>" for call in calls), "12")
    return [m["content"] for m in run(agent, policy.generate, context(tokenizer)).turns[1].messages[:-1]]


def test_programs_are_run_and_their_output_is_the_answer():
    agent = MultiTurn(tools=["calculator", "python"], sandbox="none")
    assert agent.tools[1]["function"]["parameters"]["required"] == ["code"]
    got = answers(agent, "print(6 * 7)\nprint('ab')", "x = 1", "print(1)\n1 / 0", "x = ")
    assert got[:2] == ["42\nab\n", "(it printed nothing)"]
    assert got[2].startswith("error: exit code 1\n1\n") and got[2].endswith("ZeroDivisionError: division by zero")
    assert got[3].startswith("error: exit code 1") and got[3].endswith("SyntaxError: invalid syntax")


def test_a_program_that_does_not_end_is_killed():
    agent = MultiTurn(tools=["python"], sandbox="none", tool_timeout_s=1.0)
    (got,) = answers(agent, "while True:\n    pass")
    assert got in ("error: python did not return within 1 s", "error: it was killed after 1 s")


def test_an_error_has_the_end_of_a_long_output():
    (got,) = answers(MultiTurn(tools=["python"], sandbox="none"), "print('x' * 9000)\nraise ValueError('last')")
    assert got.endswith("ValueError: last") and len(got) < 2000


def test_programs_are_not_run_where_they_can_not_be_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"agent\.args\.sandbox: bwrap is not installed.*with `none`"):
        MultiTurn(tools=["python"])
    with pytest.raises(ConfigError, match=r"agent\.args\.tools is 'pithon'; .*did you mean 'python'"):
        MultiTurn(tools=["pithon"])
