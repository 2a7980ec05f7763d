"""examples/reasoning_gym: rows and scores of its tasks, through a step of training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import steps_of, train, write_run

FOLDER = Path(__file__).parents[2] / "examples" / "reasoning_gym"
TASKS = ("chain_sum", "rearc")  # entries of the second have tuples, which JSON does not keep


def test_rows_of_a_task_are_scored_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym, which compiles C")
    monkeypatch.syspath_prepend(FOLDER)
    from tasks import score

    for task in TASKS:
        rows = tmp_path / f"{task}.jsonl"
        command = [sys.executable, str(FOLDER / "tasks.py"), task, "--size", "8", "--seed", "3", "--out", str(rows)]
        subprocess.run(command, check=True, timeout=100)
        for line in rows.read_text().splitlines():
            row = json.loads(line)
            texts = (
                f"so <answer>0</answer> no: <answer> {row['answer']} </answer>",
                row["answer"],
                "<answer>7</answer>",
            )
            right, without_tags, wrong = (score(text, row["answer"], {"meta": row}) for text in texts)
            assert right == 1.0 > max(without_tags, wrong), row
    config = write_run(tmp_path)
    changes = ['reward.terms={"score": {"kind": "tasks:score"}}', f"run.module_folder={FOLDER}", "loop.num_steps=1"]
    changes += [f"data.path={tmp_path / 'chain_sum.jsonl'}", "data.max_prompt_tokens=240", "cluster.executor=inline"]
    (step,) = steps_of(train(config, "gym", *changes))
    assert step["reward/failed"] == 0.0
