"""What `meshrl eval` and `meshrl sft` print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_run import write_run

from meshrl.cli import main
from meshrl.cluster import actors

INLINE = "cluster.executor=inline"


def test_an_evaluation_prints_readable_names_with_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_run(tmp_path)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()[:3]
    answers = dict.fromkeys(json.loads(row)["answer"] for row in rows)
    overrides = ["data.path=null", "data.eval_path=rows.jsonl", "data.eval_limit=3", "loop.eval_samples=2"]
    assert main(["eval", str(config), INLINE, *overrides, "data.eval_by=levle"]) == 2
    assert "data.eval_by: no held-out row has the column 'levle'; they have answer" in capsys.readouterr().err
    assert main(["eval", str(config), INLINE, *overrides, "data.eval_by=answer"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    printed = {line[0]: line[-1].strip() for line in lines}
    assert list(printed) == [
        "mean score (mean@2)",
        "standard error of the mean score",
        "lowest score",
        "highest score",
        "prompts with a passed answer (pass@2)",
        "mean reward",
        "mean score of ascii",
        "mean answer length",
        "held-out prompts",
        "failed attempts",
        "share of the most frequent answer",
        "different answers",
        *(f"mean score of {answer}" for answer in answers),
    ]
    assert printed["held-out prompts"] == "3 prompts" and printed["failed attempts"] == "0 attempts"


def test_supervised_training_prints_its_start_its_steps_and_its_end_as_train_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = write_run(tmp_path)
    sections = json.loads(config.read_text())
    row = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    sft = {"path": "rows.jsonl", "num_steps": 2, "rows_per_step": 1, "max_row_tokens": 64}
    config.write_text(json.dumps({name: sections[name] for name in ("model", "train", "run")} | {"sft": sft}))
    assert main(["sft", str(config), INLINE, "run.name=one"]) == 0
    folder = tmp_path / "runs" / "one"
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("note: ")]
    assert lines[0] == f"run {folder}: starting 1 train rank, executor inline"
    assert re.fullmatch(r"ready after [\d.]+ s; run_notes.txt has more about the start", lines[1])
    assert [line.partition("  ")[0] for line in lines[2:4]] == ["step 1/2", "step 2/2"]
    recorded = [line.partition("  ")[2] for line in (folder / "run_notes.txt").read_text().splitlines()]
    assert [line for line in recorded if line.startswith("attention auto: SDPA")]
    (disk,) = [line for line in recorded if line.startswith("disk: at most ")]
    assert " free: states " in disk and "newest 2 kept" in disk
    assert f"wrote {folder / 'checkpoints' / 'step_000002' / 'model'}" in lines
    assert lines[-1].startswith("done: 2 steps in ") and lines[-1].endswith(f"see {folder / 'report.html'}")


@pytest.mark.parametrize(
    ("dtype", "not_tiny", "printed"), [("bfloat16", 0, 1), ("bfloat16", 1 << 30, 0), ("float32", 0, 0)]
)
def test_a_run_in_a_dtype_that_its_cpu_multiplies_slowly_names_the_faster_one(
    dtype: str, not_tiny: int, printed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    rates = {torch.float32: 250e9, torch.bfloat16: 50e9}
    monkeypatch.setattr(actors, "NOT_TINY", not_tiny)
    monkeypatch.setattr(actors, "peak_flops", lambda device, dtype: rates[dtype])
    assert main(["train", str(write_run(tmp_path)), INLINE, f"model.dtype={dtype}", "loop.num_steps=1"]) == 0
    line = "matrix products in bfloat16 take much longer than in float32 on this CPU: model.dtype=float32 "
    assert capsys.readouterr().out.count(line) == printed


def test_a_run_prints_few_lines_before_its_first_step_and_names_a_default_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = write_run(tmp_path)
    sections = json.loads(config.read_text())
    del sections["reward"]
    config.write_text(json.dumps(sections))
    assert main(["train", str(config), INLINE, "run.name=one", "data.eval_path=rows.jsonl", "loop.num_steps=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines[: next(i for i, line in enumerate(lines) if line.startswith("step 1/1"))]
    assert len(start) <= 8 and any(line.startswith("note: the reward is the default, math_answer") for line in start)
    assert not [line for line in start if line.startswith(("decided: ", "disk: ", "attention "))]
