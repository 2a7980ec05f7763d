"""A run that an earlier version of meshrl has written is read and continued by this one.

tests/fixtures/former_run is a config with its model, rows and reward, and its run of two steps, made by commit b283cbb
(schema 3 of checkpoints) in /tmp/meshrl-demo; without its report, its first model and its first evaluation. If a change
makes such a folder unreadable on purpose, this test states the error that names the versions.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import steps_of

import meshrl
from meshrl.cli import main

FORMER = Path(__file__).parents[1] / "fixtures" / "former_run"
RUN = "runs/run"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, which is the working folder; the run's config has its paths."""
    home = shutil.copytree(FORMER, tmp_path / "home")
    config = home / RUN / "config.yaml"
    config.write_text(config.read_text().replace("/tmp/meshrl-demo", str(home)))
    monkeypatch.chdir(home)
    return home


def test_it_is_viewed_reported_and_listed(home: Path, capsys: pytest.CaptureFixture[str]):
    for command in (["report", RUN], ["view", RUN], ["view", RUN, "--step", "2"], ["status", RUN], ["runs", "runs"]):
        assert main(command) == 0, command
    printed = capsys.readouterr().out
    assert "2 prompts, 4 answers" in printed and "0.612" in printed and "run  done   2 of 2 steps" in printed
    assert (home / RUN / "report.html").stat().st_size > 50_000
    assert (home / RUN / "view.html").stat().st_size > 20_000
    run = meshrl.Run(RUN)
    assert run.metrics["reward/mean"] == run.summary["reward_curve"] == [0.40625, 0.6116071428571428]
    assert len(run.trajectories(1)) == 4 and run.best_model == run.model


def test_it_is_evaluated_and_resumed(home: Path):
    assert main(["eval", RUN, "--out", "evaluated"]) == 0
    (line,) = (home / "evaluated" / "result.json").read_text().splitlines()
    assert json.loads(line)["metrics"]["eval/mean_at_k"] == pytest.approx(1.0, abs=0.25)  # of greedy answers
    before = steps_of(home / RUN)
    assert main(["train", "config.yaml", "loop.num_steps=3", "run.resume=auto"]) == 0
    after = steps_of(home / RUN)
    assert after[: len(before)] == before and len(meshrl.Run(RUN).metrics["reward/mean"]) == 3
    assert "resum" in (home / RUN / "run_notes.txt").read_text()
