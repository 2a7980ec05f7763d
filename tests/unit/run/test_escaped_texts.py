"""Control characters of graders, agents, answers and row ids reach neither the terminal nor the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_run import write_run

from meshrl.cli import main

CONTROL = "\x1b[2J\x07\x9b\u202e"
ESCAPED = r"\x1b[2J\x07\x9b\u202e"
MODULE = f"""
from meshrl.agent.loop import SingleTurn

def fails(completion, answer):
    raise RuntimeError({CONTROL!r})

def score(completion, answer):
    return len(completion) % 3 / 4  # below 1: the report shows the answers as wrong ones

class Agent(SingleTurn):
    async def run(self, prompt, index, generate, ctx):
        raise RuntimeError({CONTROL!r})
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny run whose rows have control characters in their file, ids, questions and answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restores it
    (tmp_path / "escape_codes.py").write_text(MODULE)
    path = write_run(tmp_path)
    rows = [{"question": f"{i}+{CONTROL}", "answer": CONTROL} for i in range(4)]
    file = f"rows{CONTROL}.jsonl"  # the ids of its rows contain its name
    (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = json.loads(path.read_text())
    written["cluster"] = {"executor": "inline"}
    written["reward"]["terms"] = {"length": {"kind": "escape_codes:score"}}
    written["data"] |= {"path": file, "eval_path": file}
    written["loop"] |= {"num_steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2}
    path.write_text(json.dumps(written))
    return path


def controls_in(text: str) -> set[str]:
    return set(CONTROL) & set(text) - set("[2J")


@pytest.mark.parametrize("override", ["reward.terms.length.kind=escape_codes:fails", "agent.kind=escape_codes:Agent"])
def test_errors_of_graders_and_agents_are_escaped(config: Path, override: str, capsys: pytest.CaptureFixture[str]):
    try:
        assert main(["train", str(config), "run.name=one", override]) == 1
    except RuntimeError as error:  # of the agent; Python calls this hook
        sys.excepthook(type(error), error, error.__traceback__)
    printed = capsys.readouterr()
    assert ESCAPED in printed.err and not controls_in(printed.err + printed.out)
    page = Path("runs/one/report.html").read_text()
    assert ESCAPED in page and not controls_in(page)


def test_questions_and_answers_in_the_report_are_escaped(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(config), "run.name=one"]) == 0
    printed = capsys.readouterr()
    assert not controls_in(printed.err + printed.out)
    page = Path("runs/one/report.html").read_text()
    assert ESCAPED in page and not controls_in(page)
    (first, *_) = Path("runs/one/rollouts/step_000001.jsonl").read_text().splitlines()
    assert CONTROL in json.loads(first)["prompt"]["id"]  # data stays as it is
