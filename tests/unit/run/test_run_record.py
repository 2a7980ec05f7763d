"""The output of a run: the best model, result.json, report.html, and metrics that the glossary explains."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tiny_run import train, write_run

from meshrl.config.load import Loaded, load_run_config
from meshrl.config.run import RunConfig
from meshrl.core.errors import CheckpointError, MeshrlError, RewardError
from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.sinks import JsonlSink, read_metrics
from meshrl.process.family import started_at
from meshrl.run import models
from meshrl.run.folder import Start, claim, run_name
from meshrl.run.live import LiveRun, live_run
from meshrl.run.models import Best, model_folder, read_best, replace_best
from meshrl.run.signals import Stop
from meshrl.run.status import read_status
from meshrl.tools.report.page import write_report
from tests.waiting import wait_until

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
    return float(len(completion) % 3)
'''


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny run whose reward is GRADER, evaluated on one held-out row after every step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grader_of_this_test.py").write_text(GRADER)
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"question": "1+1", "answer": "held-out"}))
    path = write_run(tmp_path)
    written = json.loads(path.read_text())
    written["cluster"] = {"executor": "inline"}
    written["data"]["eval_path"] = "held_out.jsonl"
    written["reward"]["terms"] = {"answer": {"kind": "grader_of_this_test:score"}}
    written["loop"] = {"num_steps": 4, "prompts_per_step": 2, "samples_per_prompt": 2, "eval_every_steps": 1}
    path.write_text(json.dumps(written))
    return path


def _recorded(loaded: Loaded[RunConfig]) -> AbstractContextManager[LiveRun]:
    """A run of four steps without a loop."""
    return live_run(loaded, "train", 4, Stop(), write_report)


def test_the_best_model_is_retained_and_result_json_names_it(config: Path, tmp_path: Path):
    """Each evaluation up to step 3 is better than all before, step 4 equals the best: the model of step 1 is removed,
    the model of step 2 is retained because of save_every_steps."""
    script = tmp_path / "script"
    script.write_text("0.25 0.5 0.625 0.75 0.75")
    folder = train(config, "best", "loop.save_every_steps=2", f"reward.terms.answer.args.script={script}")

    best = read_best(folder)
    assert best is not None and (best.step, best.score) == (3, 0.75)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["best.json", "step_000002", "step_000003", "step_000004"]
    assert (Path(best.model) / "model.safetensors").stat().st_size > 0

    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["error"], result["steps"]) == ("done", None, 4)
    assert result["best"] == {"step": 3, "mean_at_k": 0.75, "model": best.model}
    assert [e["mean_at_k"] for e in result["evals"]] == [0.25, 0.5, 0.625, 0.75, 0.75]
    page = (folder / "report.html").read_text()
    assert "0.250 → 0.750" in page and "best 0.750 after step 3" in page
    assert page.count("4 weight syncs up to version 4: every sampler acknowledged") == 2  # wire and read-back

    _, units = read_metrics(folder / "metrics.jsonl")
    explained = {name: meaning_of(name) for name in units}
    assert [name for name, found in explained.items() if found is None] == []
    assert {"correction/effective_sample_size", "correction/clipped_fraction"} <= set(units)
    assert {n: units[n] or "none" for n in units} == {n: found.unit for n, found in explained.items() if found}


def test_a_resumed_run_drops_a_best_model_that_is_newer_than_its_checkpoint(config: Path, tmp_path: Path):
    """P27: step 3 is better than step 1, and the run is killed before step 3 is saved; the repeated step 3 is worse.
    The model of step 1, which the checkpoint of step 2 records as the best, still exists."""
    script = tmp_path / "script"
    overrides = ("loop.num_steps=3", "loop.save_every_steps=2", f"reward.terms.answer.args.script={script}")
    script.write_text("0.25 0.5 0.125 0.875")
    folder = train(config, "forgets", *overrides)
    best = read_best(folder)
    assert best is not None and (best.step, best.score) == (3, 0.875)
    shutil.rmtree(folder / "checkpoints" / "step_000003" / "state")
    script.write_text("0.375")
    train(config, "forgets", *overrides, "run.resume=auto")
    best = read_best(folder)
    assert best is not None and (best.step, best.score) == (1, 0.5)
    assert (Path(best.model) / "model.safetensors").stat().st_size > 0


def test_a_run_that_returns_to_a_checkpoint_of_another_run_has_neither_its_best_model_nor_an_early_end(
    config: Path, tmp_path: Path
):
    """Train ranks are lost before the first checkpoint of a run that was resumed from another run. The best model that
    the checkpoint records is in the other run's folder. The step at which on_step ended the run will be repeated."""
    there = tmp_path / "other" / "checkpoints" / "step_000002" / "state"
    start = Start(2, there, {"best": {"step": 1, "score": 0.5, "model": "step_000001/model"}})
    with _recorded(load_run_config(config, ["run.name=branch"])) as record:
        record.end_early()
        replace_best(record.folder, Best(3, 0.75, str(model_folder(record.folder, 3))), lambda step: True)
        assert read_best(record.folder) is not None
        record.continue_from(start)
        assert read_best(record.folder) is None and not record.ends_early


def test_a_resumed_run_has_no_result_before_it_ends_and_may_change_its_dtype(config: Path, tmp_path: Path):
    """P43: a kill after the resume must not leave the result of the earlier part. The limit of the proof is measured
    again, because another dtype rounds otherwise."""
    seen = []

    class Watching(JsonlSink):
        def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
            seen.append((self._path.parent / "result.json").exists())
            super().write(step, values, units)

    script = tmp_path / "script"
    script.write_text("0.25 " * 4)
    overrides = ("loop.eval_every_steps=0", f"reward.terms.answer.args.script={script}")
    folder = train(config, "longer", "loop.num_steps=1", *overrides)
    assert (folder / "result.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshrl.run.live.JsonlSink", Watching)
        train(config, "longer", "loop.num_steps=2", *overrides, "run.resume=auto", "model.dtype=bfloat16")
    assert seen and not any(seen)
    assert json.loads((folder / "result.json").read_text())["steps"] == 2


def test_the_folder_of_a_running_run_is_refused(config: Path):
    """P43: with run.resume=auto a second start would remove the files that the first one writes."""
    loaded = load_run_config(config, ["run.name=used", "run.resume=auto"])
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = Path(loaded.config.run.folder) / "used"
    folder.mkdir(parents=True)
    host, started = socket.gethostname(), started_at(other.pid)
    assert started is not None
    status = {"host": host, "pid": other.pid, "started": started, "num_steps": 4, "values": {}}
    text = json.dumps({**status, "step": 1, "phase": "train", "since": 1.0})
    (folder / "status.json").write_text(text)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(MeshrlError, match=rf"still uses this folder \(process {other.pid}\)"), _recorded(loaded):
        pass
    assert (folder / "metrics.jsonl").exists() and (folder / "status.json").read_text() == text
    other.communicate(b"\n")
    with _recorded(loaded):
        pass


def test_a_model_without_enough_disk_space_is_not_begun(config: Path, monkeypatch: pytest.MonkeyPatch):
    """P28"""
    asked = []

    def no_room(folder: Path, num_bytes: int, what: str = "a checkpoint") -> None:
        asked.append((what, num_bytes))
        raise CheckpointError(f"{what} takes too much")

    monkeypatch.setattr(models, "require_space", no_room)
    with pytest.raises(CheckpointError, match="a model takes too much"):
        train(config, "no_room", "loop.num_steps=1", "loop.save_best=false")
    folder = Path(json.loads(config.read_text())["run"]["folder"]) / "no_room"
    assert list((folder / "checkpoints").rglob("*.safetensors*")) == []
    size = (config.parent / "model" / "model.safetensors").stat().st_size
    assert asked[0][0] == "a model" and asked[0][1] > size


def test_a_failed_run_reports_its_error_and_its_metrics(config: Path):
    """The grader fails on one of the rows, so the run ends in the step that draws it."""
    with pytest.raises(RewardError):
        train(config, "fails", "loop.num_steps=10", "data.shuffle=false")
    folder = Path(json.loads(config.read_text())["run"]["folder"]) / "fails"
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed" and "RewardError" in result["error"] and "the grader broke" in result["error"]
    assert result["steps"] == 1
    page = (folder / "report.html").read_text()
    assert "the grader broke" in page and "reward/mean" in page


def test_the_phases_of_a_run_are_in_its_status_file_and_on_the_terminal(config: Path, monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with _recorded(load_run_config(config, ["run.name=phases"])) as record:
        before = len(terminal.getvalue())
        with record.spans("reward"):
            assert wait_until(lambda: read_status(record.folder).phase == "reward")
            assert wait_until(lambda: "reward" in terminal.getvalue()[before:])


def test_runs_that_begin_in_the_same_second_get_different_names(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded = load_run_config(config, ["run.name=auto", f"run.folder={tmp_path}"])
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    names = [run_name(loaded) for _ in range(3)]
    assert names == [f"{loaded.path.stem}-20260102-030405{end}" for end in ("", "-2", "-3")]


def test_a_run_that_ended_before_its_first_step_does_not_occupy_its_name(config: Path):
    """P43: the next start takes over its folder; of two at once, only one does. A folder with a step stays occupied."""
    loaded = load_run_config(config, ["run.name=again"])

    def start_once_more() -> None:
        with (
            pytest.raises(MeshrlError, match=r"again .*choose another run\.name"),
            _recorded(loaded),
        ):
            pytest.fail("two runs have one folder")

    for _ in range(2):
        with pytest.raises(RewardError), _recorded(loaded) as record:
            start_once_more()
            raise RewardError("a reward that can't work")
        assert json.loads((record.folder / "result.json").read_text())["status"] == "failed"
    folder = train(config, "again", "loop.num_steps=1", "data.shuffle=false")
    assert json.loads((folder / "result.json").read_text())["status"] == "done"
    start_once_more()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_of_two_runs_that_take_over_a_folder_at_once_only_one_gets_it(config: Path, resume: str):
    """P43: when the second one asks, the first has not written its status yet."""
    with pytest.raises(RewardError), _recorded(load_run_config(config, ["run.name=at_once"])) as record:
        raise RewardError("a reward that can't work")
    claim(record.folder, resume)
    with pytest.raises(MeshrlError, match="at_once already contains a run"):
        claim(record.folder, "never")


def test_the_folder_of_a_new_run_under_resume_auto_is_not_taken_over(config: Path):
    """P43: it began in the folder of a run that had ended before its first step."""
    never, auto = (load_run_config(config, ["run.name=both", f"run.resume={resume}"]) for resume in ("never", "auto"))
    with pytest.raises(RewardError), _recorded(never):
        raise RewardError("a reward that can't work")
    with (
        _recorded(auto),
        pytest.raises(MeshrlError, match="both already contains a run"),
        _recorded(never),
    ):
        pytest.fail("two runs have one folder")
