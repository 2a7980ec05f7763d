"""`meshrl train` with outputs that are lost while it runs: it ends with code 0, all metrics and its checkpoint."""

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
GRADER = '''
import shutil
import time
from pathlib import Path

RUN = Path("runs/one")

def score(completion, answer):
    """In the second step, removes the rollouts of the first, as another program would."""
    metrics, removed = RUN / "metrics.jsonl", RUN / "removed"
    if metrics.exists() and "loss/policy" in metrics.read_text() and not removed.exists():
        removed.touch()
        while not (RUN / "rollouts" / "step_000001.tokens.parquet").exists():  # it is written last
            time.sleep(0.01)
        shutil.rmtree(RUN / "rollouts")
    return len(completion) % 3
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "removing_grader.py").write_text(GRADER)
    path = write_run(tmp_path)
    written = json.loads(path.read_text())
    written["reward"]["terms"] = {"length": {"kind": "removing_grader:score"}}
    path.write_text(json.dumps(written))
    return path


def start(config: Path, shell: str) -> subprocess.Popen[bytes]:
    """`meshrl train` by a shell command, in which "$@" is the command of two steps."""
    command = [sys.executable, "-m", "meshrl", "train", config.name, "run.name=one"]
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    return subprocess.Popen(
        ["env", "-u", "PYTHONUNBUFFERED", "sh", "-c", shell, "sh", *command],
        cwd=config.parent,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def require_complete(folder: Path) -> dict[str, int]:
    """Checks the run's data. Returns the failed writes by output."""
    assert [line.step for line in read_metrics(folder / "metrics.jsonl")[0]] == [1, 2]
    assert (folder / "checkpoints" / "step_000002" / "state" / "manifest.json").is_file()
    assert (folder / "checkpoints" / "step_000002" / "model" / "model.safetensors").is_file()
    assert "done" in (folder / "report.html").read_text()
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 2)
    counts: dict[str, int] = result.get("failed_writes", {})
    return counts


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_continues_without_the_reader_of_its_output_and_without_its_rollouts(config: Path):
    """As `meshrl train ... | head -1`."""
    run = start(config, 'exec "$@"')
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline().startswith(b"run ")
    run.stdout.close()
    error = run.stderr.read().decode()
    assert run.wait() == 0, error
    counts = require_complete(config.parent / "runs" / "one")
    assert counts.keys() == {"terminal"} and "Traceback" not in error
    assert f"outputs that are not complete: terminal: {counts['terminal']} writes failed (Broken pipe)" in error
    rollouts = sorted((config.parent / "runs" / "one" / "rollouts").glob("*.jsonl"))
    assert [path.name for path in rollouts] == ["step_000002.jsonl"]  # the folder was created again


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_continues_when_its_output_goes_to_a_full_disk(config: Path):
    run = start(config, 'exec "$@" cluster.executor=inline >/dev/full 2>/dev/full')
    assert run.wait() == 0
    counts = require_complete(config.parent / "runs" / "one")
    assert counts.keys() == {"terminal"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_closed_standard_streams_starts_its_ranks_and_ends(config: Path):
    run = start(config, 'exec "$@" <&- >&- 2>&-')
    assert run.wait() == 0
    assert require_complete(config.parent / "runs" / "one") == {}
