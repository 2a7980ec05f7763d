"""The loss of `meshrl sft` on rows that are not trained."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_run import write_run

import meshrl
from meshrl.cluster.train_group import TrainGroup
from meshrl.core.errors import ConfigError, DataError
from meshrl.data.datasets import is_held_out


def _sft(folder: Path, name: str, resume: str = "never", **sft: object) -> meshrl.Run:
    sections = json.loads((folder / "config.yaml").read_text())
    rows = {"path": str(folder / "rows.jsonl"), "prompt": "question", "rows_per_step": 4, "max_row_tokens": 64, **sft}
    config = {part: sections[part] for part in ("train", "run")} | {"cluster": {"executor": "inline"}, "sft": rows}
    config["model"] = {"path": str(folder / "model"), "dtype": "float32"}
    config["run"] = {"folder": str(folder / "runs"), "name": name, "resume": resume}
    return meshrl.sft(config, quiet=True)


def _sides(folder: Path, fraction: float) -> tuple[list[str], list[str]]:
    """The lines of rows.jsonl that are trained with this eval_fraction, and those that are held out."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    asked = {line: [{"role": "user", "content": json.loads(line)["question"]}] for line in lines}
    held = [line for line in lines if is_held_out(asked[line], fraction)]
    return [line for line in lines if line not in held], held


def test_the_loss_of_held_out_rows_is_that_of_training_on_them_and_changes_no_step(tmp_path: Path):
    write_run(tmp_path)
    run = _sft(tmp_path, "held", eval_fraction=0.3, eval_every_steps=2, num_steps=3)
    losses = run.summary["held_out_losses"]
    assert [*losses] == ["0", "2", "3"]
    lines = [(line.step, line.metrics["eval/loss"]) for line in run.lines if "eval/loss" in line.metrics]
    assert lines == [(int(step), pytest.approx(loss)) for step, loss in losses.items()]
    kept, held = _sides(tmp_path, 0.3)
    (tmp_path / "rows.jsonl").write_text("\n".join(held))
    of_held = _sft(tmp_path, "only", num_steps=1, rows_per_step=len(held))
    assert losses["0"] == pytest.approx(of_held.metrics["loss/nll"][0], rel=1e-5)
    (tmp_path / "rows.jsonl").write_text("\n".join([*kept, *held]))
    without = _sft(tmp_path, "same", eval_fraction=0.3, num_steps=3)
    assert without.metrics["loss/nll"] == run.metrics["loss/nll"]


def test_held_out_rows_of_a_file_have_the_same_loss_and_are_compared_at_a_resume(tmp_path: Path):
    write_run(tmp_path)
    kept, held = _sides(tmp_path, 0.3)
    of_fraction = _sft(tmp_path, "fraction", eval_fraction=0.3, num_steps=1)
    (tmp_path / "rows.jsonl").write_text("\n".join(kept))
    (tmp_path / "held.jsonl").write_text("\n".join(held))
    of_file: dict[str, Any] = {"eval_path": str(tmp_path / "held.jsonl"), "num_steps": 1}
    run = _sft(tmp_path, "file", **of_file)
    assert run.summary["held_out_losses"]["0"] == pytest.approx(of_fraction.summary["held_out_losses"]["0"], rel=1e-5)
    assert "are training rows" not in (run.folder / "run_notes.txt").read_text()
    (tmp_path / "held.jsonl").write_text("\n".join([*held[1:], kept[0]]))
    with pytest.raises(DataError, match="held_out was"):
        _sft(tmp_path, "file", "auto", **of_file | {"num_steps": 2})
    (tmp_path / "held.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="no column 'question'"):
        _sft(tmp_path, "bad", **of_file)
    other = _sft(tmp_path, "trained", eval_path=str(tmp_path / "rows.jsonl"), num_steps=1)
    assert "note: 1" in (notes := (other.folder / "run_notes.txt").read_text()) and "are training rows, too" in notes


def test_a_signal_ends_a_held_out_loss_and_the_resumed_run_computes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path)
    config: dict[str, Any] = {"eval_fraction": 0.5, "eval_every_steps": 2, "num_steps": 4, "rows_per_step": 2}
    expected = _sft(tmp_path, "straight", **config)
    forward, calls = TrainGroup.forward, list[str]()

    async def interrupted(self: TrainGroup, rows: Any, role: str) -> Any:
        calls.append(role)
        if len(calls) == num_calls + 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return await forward(self, rows, role)

    num_calls = -(-len(_sides(tmp_path, 0.5)[1]) // 2)
    monkeypatch.setattr(TrainGroup, "forward", interrupted)
    with pytest.raises(SystemExit):
        _sft(tmp_path, "again", **config)
    assert len(calls) < 2 * num_calls
    run = _sft(tmp_path, "again", "auto", **config)
    assert run.summary["held_out_losses"] == expected.summary["held_out_losses"]
    assert run.metrics["loss/nll"] == expected.metrics["loss/nll"]
    assert run.metrics["eval/loss"] == expected.metrics["eval/loss"]
