"""The output of a run: the best model, result.json, report.html, and metrics that the glossary explains."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tiny_run import train

from meshrl.api import Run
from meshrl.config.load import Loaded, load_run_config
from meshrl.config.run import RunConfig
from meshrl.core.best_models import Best, read_best
from meshrl.core.errors import CheckpointError, ConfigError, RewardError
from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.notes import important
from meshrl.monitor.sinks import JsonlSink, read_metrics
from meshrl.monitor.status import read_status
from meshrl.rollout.embedded import kv_cache
from meshrl.run import keeper
from meshrl.run.folder import Start
from meshrl.run.models import model_folder, prune_models, replace_best
from meshrl.run.outputs import LiveRun, live_run
from meshrl.run.signals import Stop
from meshrl.tools.report.folder import read_run
from meshrl.tools.report.page import write_report
from meshrl.tools.runs import read_facts
from meshrl.train.checkpoint_files import (
    remove_leftovers,
    states,
)
from tests.waiting import wait_until


def _recorded(loaded: Loaded[RunConfig]) -> AbstractContextManager[LiveRun]:
    """A run of four steps without a loop."""
    return live_run(loaded, "train", 4, Stop(), write_report)


def test_the_best_model_is_retained_and_result_json_names_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Each evaluation up to step 3 is better than all before, step 4 equals the best: the model of step 1 is removed,
    the model of step 2 is retained because of save_every_steps."""
    script = tmp_path / "script"
    script.write_text("0.25 0.5 0.625 0.75 0.75")
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: 10**9)
    folder = train(config, "best", "loop.save_every_steps=2", f"reward.terms.answer.args.script={script}")

    best = read_best(folder)
    assert best is not None and (best.step, best.score) == (3, 0.75)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["best.json", "step_000002", "step_000003", "step_000004"]
    assert (Path(best.model) / "model.safetensors").stat().st_size > 0

    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["error"], result["steps"]) == ("done", None, 4)
    assert result["best"] == {"step": 3, "mean_at_k": 0.75, "term": "weighted_sum", "model": best.model}
    assert [e["mean_at_k"] for e in result["evals"]] == [0.25, 0.5, 0.625, 0.75, 0.75]
    assert {e["term"] for e in result["evals"]} == {"weighted_sum"}
    assert Run(folder).best_model == Path(best.model)
    page = (folder / "report.html").read_text()
    assert "held-out reward 0.250 -&gt; 0.750" in page and "best: 0.750 at step 3" in page
    assert page.count("4 weight syncs up to version 4: every sampler acknowledged") == 2  # wire and read-back

    model = model_folder(folder, 4)
    notes = [line.partition("  ")[2] for line in (folder / "run_notes.txt").read_text().splitlines()]
    assert notes[0].startswith(f"run {folder}: starting 1 train rank") and f"wrote {model}" in notes
    assert notes[-3].startswith("held-out reward 0.250 -> 0.750 (unchanged: +0.500, -1.000 to ")  # of a single prompt
    assert notes[-3].endswith("); best: 0.750 at step 3") and notes[-2] == f"best model: {best.model}"
    assert result["verdict"]["outcome"] == "unchanged" and result["verdict"]["text"] == notes[-3]
    assert (folder / "rewards.log").read_text().splitlines()[0].endswith(r"  worker 0: graded \x1b[2J")
    assert notes[1] == 'decided: rollout.max_context_tokens 256, algo.correction.kind "off"'
    measured = "decided: rollout.embedded.kv_cache_bytes 800000000: 80% of free memory; no limit on a CPU"
    assert notes.count(measured) == 1 and measured not in capsys.readouterr().out
    assert "  # default, here 0: loop.kind is colocated\n" in (folder / "config.yaml").read_text()
    (cut,) = important((folder / "run_notes.txt").read_text())
    assert "health: truncation since step 1: rollout/truncated_fraction: the last value above 0.5 (here 0.75)" in cut
    assert notes[-1].startswith("done: 4 steps") and not any("grad " in note for note in notes)  # no lines of steps
    assert "All notes</summary>" in page and f"wrote {model}" in page

    lines, units = read_metrics(folder / "metrics.jsonl")
    written = [line.metrics["checkpoint/write_s"] for line in lines if "checkpoint/write_s" in line.metrics]
    assert len(written) == 1 and written[0] > 0  # of step 2; no step follows the checkpoint of step 4
    explained = {name: meaning_of(name) for name in units}
    assert [name for name, found in explained.items() if found is None] == []
    assert {"correction/effective_sample_size", "correction/clipped_fraction"} <= set(units)
    assert {n: units[n] or "none" for n in units} == {n: found.unit for n, found in explained.items() if found}


def _models(run: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (run / "checkpoints").glob("step_*/model"))


@pytest.mark.parametrize(("keep", "left"), [(1, [20, 50]), (2, [20, 40, 50]), (None, [20, 30, 40, 50])])
def test_old_models_are_removed_unless_they_are_the_best_of_the_run_or_retained(keep, left, tmp_path: Path):
    for step in (10, 20, 30, 40, 50):
        model_folder(tmp_path, step).mkdir(parents=True)
        (model_folder(tmp_path, step) / "model.safetensors").touch()
    for step in (30, 10, 20):
        replace_best(tmp_path, best := Best(step, 0.5, str(model_folder(tmp_path, step))), lambda old: old >= 30)
    prune_models(tmp_path, keep)
    assert _models(tmp_path) == left and read_best(tmp_path) == best
    assert {path.name for path in (tmp_path / "checkpoints").glob("step_*")} == {f"step_{step:06d}" for step in left}


def test_a_run_keeps_its_newest_models_and_writes_one_again_that_it_needs(config: Path, tmp_path: Path):
    """Step 1 is the best. When the state of step 4 is lost, the run continues from step 3, whose model is removed
    already, and ends there."""
    script = tmp_path / "script"
    script.write_text("0.25 0.5 0.375 0.3 0.2")
    overrides = ("loop.save_every_steps=1", f"reward.terms.answer.args.script={script}", "run.keep_models=1")
    folder = train(config, "few", *overrides)
    assert _models(folder) == [1, 4]
    shutil.rmtree(folder / "checkpoints" / "step_000004" / "state")
    train(config, "few", *overrides, "loop.num_steps=3", "run.resume=auto")
    assert _models(folder) == [1, 3] and _models(folder / "earlier_1") == [4]
    assert json.loads((folder / "result.json").read_text())["model"] == str(model_folder(folder, 3))


def test_what_a_killed_run_left_of_a_model_is_removed(tmp_path: Path):
    """An export or a removal that was interrupted."""
    left, complete = tmp_path / "step_000001" / "model.aside", tmp_path / "step_000002" / "model"
    left.mkdir(parents=True)
    complete.mkdir(parents=True)
    remove_leftovers(tmp_path)
    assert complete.is_dir() and not left.parent.exists()


def curves_of(folder: Path) -> dict[str, dict[int, float]]:
    """The values that TensorBoard shows, by name and step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {name: {e.step: e.value for e in read.Scalars(name)} for name in read.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("change", "part", "scale"), [("loop.eval_term=answer", "term", 1.0), ("data.eval_path=other.jsonl", "rows", 0.5)]
)
def test_a_resume_with_another_test_compares_no_scores_with_the_former_ones(
    change: str, part: str, scale: float, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The evaluation after the checkpoint's step is repeated at once, and its model is the best of the new test, also
    where an earlier one had a higher score. The weight halves the reward, but not the score of the term. In TensorBoard
    no other value of the step that is repeated is lost."""
    script = tmp_path / "script"
    (tmp_path / "other.jsonl").write_text(json.dumps({"question": "3+4", "answer": "held-out"}))
    script.write_text("0.5 0.875 0.625")
    weight = "reward.terms.answer.weight=0.5"
    overrides = (weight, "loop.num_steps=2", "monitor.sinks=[tensorboard]", f"reward.terms.answer.args.script={script}")
    folder = train(config, "terms", *overrides)
    best = read_best(folder)
    assert best is not None and (best.step, best.score) == (1, 0.4375)
    script.write_text("0.25 0.375")
    capsys.readouterr()
    end = ("loop.eval_every_steps=0", "loop.num_steps=3", "run.resume=auto")
    train(config, "terms", *overrides, change, *end)
    assert f"the evaluations have other {part}" in (output := capsys.readouterr().out)
    best = read_best(folder)
    assert best is not None and (best.step, best.score) == (3, 0.375 * scale)
    result = json.loads((folder / "result.json").read_text())
    assert [(e["step"], e["mean_at_k"]) for e in result["evals"]] == [(2, 0.25 * scale), (3, 0.375 * scale)]
    name = "answer" if part == "term" else "reward"
    assert f"held-out {name} {0.25 * scale:.3f} -> {0.375 * scale:.3f} (" in output
    assert read_run(folder).series["eval/mean_at_k"].steps == [2, 3] and read_facts(folder).held_out[0][0] == 2
    line = f"3 evaluations with other {part}{', graders' if part == 'term' else ''}<"
    assert line in (folder / "report.html").read_text()
    curves = curves_of(folder / "tensorboard")
    assert curves["eval/mean_at_k"] == {0: 0.25, 1: 0.4375, 2: 0.25 * scale, 3: 0.375 * scale}
    assert [*curves["reward/mean"]] == [1, 2, 3]


def test_a_run_that_returns_to_a_checkpoint_of_another_run_has_neither_its_best_model_nor_an_early_end(
    config: Path, tmp_path: Path
):
    """Train ranks are lost before the first checkpoint of a run that was resumed from another run. The best model that
    the checkpoint records is in the other run's folder. The step at which on_step ended the run will be repeated."""
    there = tmp_path / "other" / "checkpoints" / "step_000002" / "state"
    found = Start(2, there, {"best": {"step": 1, "score": 0.5, "model": "step_000001/model"}})
    with _recorded(load_run_config(config, ["run.name=branch"])) as record:
        record.out.end_early()
        replace_best(record.folder, Best(3, 0.75, str(model_folder(record.folder, 3))), lambda step: True)
        assert read_best(record.folder) is not None
        record.out.continue_from(found)
        assert read_best(record.folder) is None and not record.out.ends_early


@pytest.mark.slow
def test_a_resumed_run_has_no_result_before_it_ends_and_may_change_its_dtype(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A kill after the resume must not leave the result of the earlier part. The limit of the proof is measured
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
        patch.setattr("meshrl.run.outputs.JsonlSink", Watching)
        train(config, "longer", "loop.num_steps=2", *overrides, "run.resume=auto", "model.dtype=bfloat16")
    assert seen and not any(seen)
    assert "The run ends if this lasts for" not in capsys.readouterr().out
    assert json.loads((folder / "result.json").read_text())["steps"] == 2


def test_a_model_without_enough_disk_space_is_not_begun(config: Path, monkeypatch: pytest.MonkeyPatch):
    """The phase of the run is then the export."""
    asked = []
    run = Path(json.loads(config.read_text())["run"]["folder"]) / "no_room"

    def no_room(folder: Path, num_bytes: int, what: str = "a checkpoint") -> None:
        asked.append((what, num_bytes))
        if what == "a model":
            assert wait_until(lambda: read_status(run).phase == "export")
            raise CheckpointError("a model takes too much")

    monkeypatch.setattr(keeper, "require_space", no_room)
    with pytest.raises(CheckpointError, match="a model takes too much"):
        train(config, "no_room", "loop.num_steps=1", "loop.save_best=false")
    assert [step for step, _ in states(run / "checkpoints")] == [1], "the training state is saved nevertheless"
    assert not list((run / "checkpoints").glob("step_*/model*"))
    size = (config.parent / "model" / "model.safetensors").stat().st_size
    assert asked[0][0] == "a model" and asked[0][1] > size


def test_the_notes_of_a_run_include_those_about_its_config(config: Path):
    loaded = load_run_config(config, ["run.name=noted", "loop.num_steps=4", "loop.save_every_steps=9"])
    with live_run(loaded, "train", 4, Stop(), write_report) as run:
        pass
    assert loaded.notices
    texts = [line.partition("  ")[2] for line in (run.folder / "run_notes.txt").read_text().splitlines()]
    assert texts[: len(loaded.notices)] == [f"note: {notice}" for notice in loaded.notices]


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


def test_a_run_whose_tracker_can_not_be_opened_reports_its_error(config: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder has files of this run already, so that it also has its result."""

    def refuse(*arguments: object) -> None:
        raise ConfigError("monitor.trackers: the server refused the key")

    monkeypatch.setattr("meshrl.run.outputs.open_trackers", refuse)
    loaded = load_run_config(config, ["run.name=refused"])
    with pytest.raises(ConfigError, match="refused the key"), _recorded(loaded):
        pytest.fail("the run has no tracker")
    result = json.loads((Path(loaded.config.run.folder) / "refused" / "result.json").read_text())
    assert result["status"] == "failed" and "refused the key" in result["error"]


def test_the_phases_of_a_run_are_in_its_status_file_and_on_the_terminal(config: Path, monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with _recorded(load_run_config(config, ["run.name=phases"])) as record:
        before = len(terminal.getvalue())
        with record.out.spans("reward"):
            assert wait_until(lambda: read_status(record.folder).phase == "reward")
            assert wait_until(lambda: "reward" in terminal.getvalue()[before:])


@pytest.mark.slow
def test_a_best_model_whose_export_was_interrupted_is_written_after_the_resume(config: Path, tmp_path: Path):
    """Its evaluation is not repeated."""
    script = tmp_path / "script"
    script.write_text("0.25 0.75")
    options = ("loop.num_steps=2", "loop.eval_every_steps=1", f"reward.terms.answer.args.script={script}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "require_space", _no_room)
        with pytest.raises(CheckpointError, match="a model takes too much"):
            train(config, "late", *options)
    script.write_text("0.5")
    folder = train(config, "late", *options, "run.resume=auto")
    best = read_best(folder)
    assert best is not None and (best.step, best.score) == (1, 0.75) and Path(best.model).is_dir()


def _no_room(folder: Path, num_bytes: int, what: str = "a checkpoint") -> None:
    if what == "a model":
        raise CheckpointError("a model takes too much")


def test_a_damaged_record_of_the_best_model_is_named(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.json").write_text("")
    with pytest.raises(CheckpointError, match=r"best\.json is damaged: .* Remove it"):
        read_best(tmp_path)
