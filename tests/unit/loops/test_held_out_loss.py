"""The loss of `meshrl sft` on rows that are not trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import write_run

import meshrl
from meshrl.data.datasets import is_held_out


def _sft(folder: Path, name: str, **sft: object) -> meshrl.Run:
    sections = json.loads((folder / "config.yaml").read_text())
    rows = {"path": str(folder / "rows.jsonl"), "prompt": "question", "rows_per_step": 4, "max_row_tokens": 64, **sft}
    config = {part: sections[part] for part in ("train", "run")} | {"cluster": {"executor": "inline"}, "sft": rows}
    config["model"] = {"path": str(folder / "model"), "dtype": "float32"}
    config["run"] = {"folder": str(folder / "runs"), "name": name}
    return meshrl.sft(config, quiet=True)


def test_the_loss_of_held_out_rows_is_that_of_training_on_them_and_changes_no_step(tmp_path: Path):
    write_run(tmp_path)
    run = _sft(tmp_path, "held", eval_fraction=0.3, eval_every_steps=2, num_steps=3)
    losses = run.summary["held_out_losses"]
    assert [*losses] == ["0", "2", "3"]
    lines = {line.step: line.metrics.get("loss/held_out") for line in run.lines}
    assert lines == {1: None, 2: pytest.approx(losses["2"]), 3: pytest.approx(losses["3"])}
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    held = [row for row in rows if is_held_out([{"role": "user", "content": row["question"]}], 0.3)]
    assert 0 < len(held) < len(rows)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    of_held = _sft(tmp_path, "only", num_steps=1, rows_per_step=len(held))
    assert losses["0"] == pytest.approx(of_held.metrics["loss/nll"][0], rel=1e-5)
    kept = [row for row in rows if row not in held]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    without = _sft(tmp_path, "same", eval_fraction=0.3, num_steps=3)
    assert without.metrics["loss/nll"] == run.metrics["loss/nll"] and len(kept) + len(held) == len(rows)
