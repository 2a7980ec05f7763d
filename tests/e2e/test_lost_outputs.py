"""`meshrl train` with outputs that are lost: it ends with code 0, all metrics and its checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import write_run

from meshrl.monitor.sinks import read_metrics

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shell", "failed"),
    [('exec "$@" cluster.executor=inline >/dev/full 2>/dev/full', ["terminal"]), ('exec "$@" <&- >&- 2>&-', [])],
    ids=["full", "closed"],
)
def test_a_run_with_full_or_closed_standard_streams_starts_its_ranks_and_ends(tmp_path: Path, shell, failed):
    config = write_run(tmp_path)
    command = [sys.executable, "-m", "meshrl", "train", config.name, "run.name=one"]
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    start = ["env", "-u", "PYTHONUNBUFFERED", "sh", "-c", shell, "sh", *command]
    assert subprocess.run(start, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}).returncode == 0
    folder = tmp_path / "runs" / "one"
    assert [line.step for line in read_metrics(folder / "metrics.jsonl")[0]] == [1, 2]
    assert (folder / "checkpoints" / "step_000002" / "state" / "manifest.json").is_file()
    assert (folder / "checkpoints" / "step_000002" / "model" / "model.safetensors").is_file()
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 2)
    assert [*result.get("failed_writes", {})] == failed
