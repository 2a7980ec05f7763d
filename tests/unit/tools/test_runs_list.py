"""`meshrl runs`, the held-out score of `meshrl status`, and how a run is shown in Python."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest

import meshrl
from meshrl.api import Evaluation
from meshrl.cli import main
from meshrl.core.errors import DataError, MeshrlError
from meshrl.monitor.status import StatusFile
from meshrl.run.folder import FolderLease
from meshrl.tools.runs import describe, list_runs, read_facts
from tests.made_runs import answer, made_run, settings


def started(folder: Path, at: float) -> None:
    """Set the start in status.json: that of the newest part of a run."""
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"started": at}))


def test_the_list_has_a_line_for_each_run_the_oldest_first(tmp_path, capsys):
    made_run(tmp_path / "b", {0: [0, 1], 1: [1, 1], 2: [1, 0]}, [0.1, 0.2], evaluation={"term": "weighted_sum"})
    exported = settings(model__path="/x/runs/r/checkpoints/step_3/model")
    made_run(tmp_path / "failed", {}, [0.5], "failed", 7, config=exported)
    made_run(tmp_path / "a", {}, [1.25], "interrupted", metric="loss/nll", config=settings(model__path="/models/qwen"))
    for at, name in ((10.0, "failed"), (11.0, "a"), (1e9, "b")):  # b was resumed then; its first step ended at 1000
        started(tmp_path / name, at)
    status = json.loads((tmp_path / "failed" / "status.json").read_text()) | {"health": ["truncation", "failures"]}
    (tmp_path / "failed" / "status.json").write_text(json.dumps(status))
    assert main(["runs", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    cells = [re.split(r"  +", line.strip()) for line in lines]
    assert re.split(r"  +", head.strip())[-3:] == ["last", "training", "health"]
    when, later = (time.strftime("%F %H:%M", time.localtime(at)) for at in (10, 1000))
    assert cells == [
        ["failed", "failed", "1 of 7 steps", when, "1m01s", "step_3/model", "0.500", "truncation, failures"],
        ["a", "interrupted", "1 of 1 steps", when, "1m01s", "models/qwen", "1.250 nll"],
        ["b", "done", "2 of 2 steps", later, "1m01s", "tiny", "reward", "0.500", "1.000", "0.500", "0.200"],
    ]
    assert "health: truncation, failures (docs/health.md)" in describe(tmp_path / "failed")


def test_running_and_killed_runs_are_distinguished_also_after_an_earlier_result(tmp_path):
    killed = made_run(tmp_path / "killed", {0: [0.5]}, [0.1], None, 9)
    (killed / "metrics.jsonl").open("a").write('{"schema":1,"step":2,"time":1,"metrics":{"eval/mean_at_k":1.')
    assert (read_facts(killed).state.word, read_facts(killed).held_out) == ("killed", [(0, 0.5)])
    resumed = made_run(tmp_path / "resumed", {}, [0.1], "failed")
    started(resumed, (resumed / "result.json").stat().st_mtime + 10)
    assert read_facts(resumed).state.word == "killed"
    lease = FolderLease(killed)
    assert lease.take()
    assert read_facts(killed).state.word == "running"
    lease.release()


def test_damaged_and_foreign_folders_and_evaluations_of_runs_do_not_stop_the_list(tmp_path):
    made_run(tmp_path / "good", {0: [1.0]}, [0.5])
    made_run(tmp_path / "good" / "eval_1")
    (made_run(tmp_path / "json", {}, [0.5]) / "result.json").write_text("{")
    (made_run(tmp_path / "metrics", {}, [0.5]) / "metrics.jsonl").write_bytes(b'"eval/mean_at_k"\n')
    (made_run(tmp_path / "old", {3: [1.0]}, []) / "status.json").unlink()
    (made_run(tmp_path / "status", {0: [0, 1]}) / "status.json").write_text("{")
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").touch()
    evaluation = made_run(tmp_path / "eval_1", {0: [0, 1]}, [], num_steps=2)
    (evaluation / "config.yaml").write_text("run:\n  name: eval_1  # meshrl eval\n")
    text = list_runs(tmp_path)
    for words in (r"good +done", r"old +done +3 steps", r"eval_1 +done +0 of 2 answers .* 0\.500"):
        assert re.search(words, text), words
    assert "folders that are no runs: 1" in text
    for words in (r"json +unknown +1 of 1 steps", r"metrics +done +1 of 1 steps", r"status +done +0 steps .* 0\.500"):
        assert re.search(words, text), words
    for words in (
        r"json: damaged: .*result\.json",
        r"metrics: damaged: .*metrics\.jsonl",
        r"status: damaged: .*status",
    ):
        assert re.search(f"^{words}", text, re.MULTILINE), words
    assert len(text.splitlines()) == 11
    with pytest.raises(MeshrlError, match="has no runs"):
        list_runs(tmp_path / "photos")


def test_names_with_control_characters_are_escaped(tmp_path, capsys):
    made_run(tmp_path / "a\x1b[31m\u202eb", {}, [0.5])
    assert main(["runs", str(tmp_path)]) == 0
    assert r"a\x1b[31m\u202eb" in capsys.readouterr().out


def test_status_shows_the_held_out_score_and_counts_answers_of_an_evaluation(tmp_path):
    run = made_run(tmp_path / "run", {0: [0, 1], 1: [1, 1], 2: [0, 0]}, [0.1, 0.2])
    shown = describe(run).splitlines()
    assert "held-out 0.500 -> 0.000 (unchanged: -0.500, -1.000 to +0.796)" in shown
    assert "highest held-out score: 1.000 at step 1" in shown
    one = made_run(tmp_path / "eval_1", {4: [0, 1, 1, 1]}, [], num_steps=4)
    (one / "config.yaml").write_text("run:\n  name: eval_1  # meshrl eval\n")
    StatusFile(one, 4, first_step=3).close()
    assert describe(one).splitlines()[1] == "3 of 4 answers"
    assert "held-out 0.750, 0.184 to 1.000 at step 4, the only evaluation" in describe(one).splitlines()
    (one / "metrics.jsonl").write_bytes(b'"eval/mean_at_k"\n')
    assert "3 of 4 answers" in describe(one) and "metrics.jsonl:1" in describe(one)
    (run / "status.json").write_text('{"pid": 7}')
    shown = describe(run).splitlines()
    assert shown[:2] == [f"{run}: done after 61 s", "2 steps"] and shown[2].startswith("held-out 0.500 -> 0.000")
    assert any("status.json: not the status of a run: 'values' is missing" in line for line in shown)
    (run / "result.json").unlink()
    assert "its process has ended without a result" in describe(run)


def test_the_best_evaluation_is_the_first_of_the_highest_and_no_nan(tmp_path):
    run = made_run(tmp_path / "r", {0: [math.nan], 1: [0.5], 2: [0.5]}, [0, 0])
    assert read_facts(run).best == (1, 0.5)


def test_a_run_in_python_shows_its_state_and_refuses_a_missing_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs" / "mine", {0: [0, 1], 2: [1, 1]}, [0, 1.0])
    made_run(tmp_path / "runs" / "other", {}, [0.25], "failed", 3)
    assert repr(meshrl.Run("runs/mine")) == "Run('runs/mine': done, 2 of 2 steps, held-out 0.5 -> 1)"
    assert repr(meshrl.Run("runs/other")) == "Run('runs/other': failed, 1 of 3 steps, reward/mean 0.25)"
    with pytest.raises(MeshrlError, match=r"runs/mime does not exist.*did you mean runs/mine\?"):
        meshrl.Run("runs/mime")
    with pytest.raises(MeshrlError, match=r"contains 2 runs, such as runs/mine"):
        meshrl.Run("runs")
    with pytest.raises(MeshrlError, match=r"elsewhere/x does not exist; give the folder of a run, such as runs/NAME$"):
        meshrl.Run("elsewhere/x")
    run = meshrl.Run("runs/mine")
    (run.folder / "result.json").write_text("{")
    assert repr(run) == "Run('runs/mine': unknown, 2 of 2 steps, held-out 0.5 -> 1)"
    (run.folder / "metrics.jsonl").unlink()
    (run.folder / "status.json").unlink()
    assert repr(run) == "Run('runs/mine': it can't be read)"


def test_the_answers_of_evaluations_and_their_texts_can_be_read(tmp_path):
    run = meshrl.Run(made_run(tmp_path / "r", {0: [0, 1], 2: [1, 1]}, [0, 1.0]))
    (run.folder / "rollouts" / "eval_mine.jsonl").touch()
    assert [t.text for t in run.eval_trajectories()] == ["1 at 2", "1 at 2"]
    assert [t.text for t in run.eval_trajectories(0)] == [t.text for t in run.eval_trajectories(-2)]
    assert [t.text for t in run.trajectories(1)] == ["answer 0 of 1", "answer 1 of 1"]
    with pytest.raises(IndexError, match=r"no evaluation after step 1 .*there are: 0, 2"):
        run.eval_trajectories(1)
    evaluation = Evaluation({"eval/mean_at_k": 0.5}, run.eval_trajectories(), Path("runs/e"))
    assert repr(evaluation) == "Evaluation('runs/e': held-out 0.5, 2 answers)"


def test_the_text_of_a_trajectory_has_all_turns_and_is_an_error_where_it_is_unknown():
    trajectory = answer("q", "first", 1.0)
    trajectory.turns += answer("q", "second", 1.0, messages=[{"role": "tool", "content": "4"}]).turns
    assert trajectory.text == "first\nsecond"
    trajectory.turns[1].messages[-1]["content"] = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    assert trajectory.text == "first\nin parts"
    for messages in ([], [{"role": "user", "content": "x"}], [{"role": "assistant"}]):
        trajectory.turns[0].messages = messages
        with pytest.raises(DataError, match=r"'q/0', turn 0: its text is unknown.*output_ids"):
            _ = trajectory.text
    trajectory.turns = []
    assert trajectory.text == ""
