"""A tiny run with an evaluation after every step, for the tests of a run's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import write_run

GRADER = '''
from pathlib import Path

def score(completion, answer, script=None):
    """Training answers by their length; held-out ones by the next number of the script."""
    if answer == "held-out" and script is not None:
        now, *later = Path(script).read_text().split()
        Path(script).write_text(" ".join(later))
        return float(now)
    if script is None and answer == "6":
        raise RuntimeError("the grader broke")
    print("graded \\x1b[2J")
    return float(len(completion) % 3)
'''


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny run whose reward is GRADER, evaluated on one held-out row after every step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grader_of_this_test.py").write_text(GRADER)
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"question": "1+2", "answer": "held-out"}))
    path = write_run(tmp_path)
    written = json.loads(path.read_text())
    written["cluster"] = {"executor": "inline"}
    written["data"]["eval_path"] = "held_out.jsonl"
    written["reward"]["terms"] = {"answer": {"kind": "grader_of_this_test:score"}}
    written["loop"] = {"num_steps": 4, "prompts_per_step": 2, "samples_per_prompt": 2, "eval_every_steps": 1}
    path.write_text(json.dumps(written))
    return path
