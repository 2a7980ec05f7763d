"""The package renderers reads the same calls in answers as `parse`, where it knows the format. Where the two differ,
the test states how."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_parsing import TOOL, WRITTEN, read

PROGRAM = Path(__file__).parents[2] / "renderers_parser.py"
TOOLS = [TOOL, {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}]
FORMS = ("hermes", "xml", "glm", "gpt_oss", "deepseek", "llama3")
ONE_FORM = {"deepseek", "llama3"}  # renderers reads one call of Llama, and none of DeepSeek V3.1's form


@pytest.fixture(scope="module")
def opinion() -> Any:
    python = os.environ.get("MESHRL_RENDERERS_PYTHON")
    if python is None:
        pytest.skip("set MESHRL_RENDERERS_PYTHON to the Python of an environment with renderers==0.1.12 and httpx")

    def opinion_of(form: str, *answers: str) -> list[dict[str, Any]]:
        begun = "<|start|>assistant" if form == "gpt_oss" else ""  # its parser gets the generation prompt, too
        asked = json.dumps([[form, begun * (not a.startswith("<|start|>")) + a, TOOLS] for a in answers])
        done = subprocess.run([python, str(PROGRAM)], input=asked, capture_output=True, text=True, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    return opinion_of


def good(ours: Any) -> list[list[Any]]:
    return [[call.name, json.loads(call.arguments)] for call in ours.tool_calls if not call.error]


@pytest.mark.parametrize("form", FORMS)
def test_calls_reasoning_and_content_are_the_same(form: str, opinion: Any):
    reasoning, first, second, *_ = WRITTEN[form]
    final = "<|channel|>final<|message|>ab<|return|>" if form == "gpt_oss" else "ab"
    if form == "gpt_oss" and reasoning:
        final = "<|start|>assistant" + final
    answers = [reasoning + final, first, reasoning + first, *([] if form in ONE_FORM else [reasoning + first + second])]
    for answer, theirs in zip(answers, opinion(form, *answers), strict=True):
        ours = read(form, answer, tools=TOOLS)
        assert good(ours) == [[name, arguments] for status, name, arguments, _ in theirs["calls"] if status == "ok"]
        assert (ours.content, ours.reasoning_content) == (theirs["content"].strip(), theirs["reasoning"] or "")


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ONE_FORM])
def test_a_malformed_call_and_one_that_is_not_closed_are_the_same_bytes(form: str, opinion: Any):
    _, first, second, malformed, close = WRITTEN[form]
    unclosed = second[: second.rindex(close)]
    (broken, cut) = opinion(form, first + malformed + second, first + unclosed)
    ours = read(form, first + malformed + second, tools=TOOLS)
    assert [bool(call.error) for call in ours.tool_calls] == [c[0] != "ok" for c in broken["calls"]] == [0, 1, 0]
    assert ours.tool_calls[1].arguments.endswith(broken["calls"][1][3].strip())
    ours = read(form, first + unclosed, tools=TOOLS)
    assert [call[0] for call in cut["calls"]] == ["ok", "unclosed_block"] and len(ours.tool_calls) == 1
    assert ours.content.endswith(cut["calls"][1][3].strip()), "here the call stays text"


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        ("{", "invalid_json"),
        ("[]", "missing_name"),
        ("7", "missing_name"),
        ('"f"', "missing_name"),
        ('{"name": 3}', "ok"),  # it would call a tool with the name 3,
        ('{"name": "a", "arguments": [1]}', "ok"),  # and with a list and a text in the place of arguments
        ('{"name": "a", "arguments": "{}"}', "ok"),
    ],
)
def test_json_that_is_no_call_is_an_error(body: str, theirs: str, opinion: Any):
    answer = f"<tool_call>{body}</tool_call>"
    ((found,),) = (each["calls"] for each in opinion("hermes", answer))
    (call,) = read("hermes", answer).tool_calls
    assert (call.error != "", found[0], found[3]) == (True, theirs, body)
