"""Tools of an MCP server, which lives as long as the run."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_agents import ScriptedPolicy, context
from tiny_tokenizers import tiny_tokenizer

from meshrl.agent.loop import MultiTurn, RunOfAgent
from meshrl.core.errors import ConfigError
from meshrl.core.types import Prompt

SERVER = Path(__file__).parent / "mcp_server.py"


@pytest.fixture(scope="module")
def command() -> str:
    pytest.importorskip("mcp")
    added = os.pathsep.join(sys.path)
    return f"env PYTHONPATH={added} {sys.executable} {SERVER}"


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if str(SERVER) in child.cmdline()]


def answers(command: str, folder: Path, *bodies: str) -> list[str]:
    """Of the calls of one answer."""
    tokenizer = tiny_tokenizer()
    agent = MultiTurn(tools=[], mcp_servers=[command], tool_timeout_s=20.0)
    assert children() == []  # the server that listed the tools has ended
    policy = ScriptedPolicy(tokenizer, "".join(f"<tool_call>{body}</tool_call>" for body in bodies), "12")

    async def conversation() -> Any:
        async with agent.opened(RunOfAgent(folder=folder, note=print)):
            assert len(children()) == 1
            prompt = Prompt(id="p", ordinal=0, messages=[{"role": "user", "content": "ab?"}])
            return await agent.run(prompt, 0, policy.generate, context(tokenizer))

    trajectory = asyncio.run(conversation())
    assert children() == []
    return [m["content"] for m in trajectory.turns[1].messages[:-1]]


def test_the_tools_of_a_server_answer_calls(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-run")
    agent = MultiTurn(tools=["calculator"], mcp_servers=[command])
    names = [tool["function"]["name"] for tool in agent.tools]
    assert names == ["calculator", "add", "fail", "environment", "end", "picture"]
    assert agent.tools[1]["function"]["description"] == "Adds two numbers."
    assert agent.tools[1]["function"]["parameters"]["required"] == ["a", "b"]
    got = answers(
        command,
        tmp_path,
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        '{"name": "add", "arguments": {"a": "1", "b": 2}}',
        '{"name": "fail"}',
        '{"name": "picture"}',
        '{"name": "environment"}',
    )
    assert got[0] == "3" and got[1].startswith("error: a of add must be of type integer")
    assert got[2] == "error: Error executing tool fail"  # the server states no more of an exception
    assert got[3] == "error: picture returned image, which is not text"
    assert "PATH" in got[4] and "OPENAI_API_KEY" not in got[4]


def test_a_server_that_ends_is_an_error_of_each_call(command: str, tmp_path: Path):
    got = answers(command, tmp_path, '{"name": "end"}', '{"name": "add", "arguments": {"a": 1, "b": 2}}')
    assert got[0].startswith("error: ")


def test_an_exception_of_the_run_stays_as_it_is_and_the_server_ends(command: str, tmp_path: Path):
    agent = MultiTurn(tools=[], mcp_servers=[command])

    async def fail() -> None:
        async with agent.opened(RunOfAgent(folder=tmp_path, note=print)):
            raise ConfigError("of the run")

    with pytest.raises(ConfigError, match=r"^of the run$"):
        asyncio.run(fail())
    assert children() == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("no-such-program", r"'no-such-program'.* did not start: FileNotFoundError"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"no config\")'", r"did not start: .* It printed: no config"),
        ("", "must be the command of a server"),
        (["a"], "must be the command of a server"),
    ],
)
def test_a_server_that_can_not_be_started_is_refused(command: str, given: Any, expected: str):
    with pytest.raises(ConfigError, match=rf"(?s)agent\.args\.mcp_servers.*{expected}"):
        MultiTurn(mcp_servers=[given])
    assert children() == []


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"agent\.args\.mcp_servers: the package mcp .*'meshrl\[agents\]'"):
        MultiTurn(mcp_servers=["python server.py"])
