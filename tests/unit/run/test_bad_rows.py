"""An error in the data ends a run before its ranks start: on large models they take minutes to load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import write_run

from meshrl.cli import main

CHAT = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize(
    ("row", "error"), [("{", "rows.jsonl:3: not JSON"), ('{"text": "hi"}', "rows.jsonl:3: no column '")]
)
def test_a_bad_row_ends_a_run_before_its_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    row: str,
    error: str,
):
    config = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    sections = json.loads(config.read_text())
    good = json.dumps({"question": "1+1", "answer": "2"} | CHAT)
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{good}\n{row}\n")
    if command == "sft":
        sft = {"path": "rows.jsonl", "num_steps": 1, "rows_per_step": 1, "max_row_tokens": 64}
        config.write_text(json.dumps({name: sections[name] for name in ("model", "train", "run")} | {"sft": sft}))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"a rank that loads this reports it")
    assert main([command, str(config), "run.name=bad"]) == 1
    printed = capfd.readouterr().err
    assert error in printed and "model.safetensors" not in printed
