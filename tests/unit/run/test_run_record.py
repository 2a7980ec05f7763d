"""The output of a run: the best model, result.json, report.html, and metrics that the glossary explains."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from poisoned_states import poison
from tiny_run import train, write_run

from meshrl.config.load import Loaded, load_run_config
from meshrl.config.run import RunConfig
from meshrl.core.errors import CheckpointError, MeshrlError, RewardError
from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.sinks import JsonlSink, read_metrics
from meshrl.monitor.status import read_status
from meshrl.run import lease, models, start
from meshrl.run.folder import Start, run_name
from meshrl.run.inputs import Objects
from meshrl.run.live import LiveRun, live_run, wait_for_folder
from meshrl.run.models import Best, model_folder, prune_models, read_best, replace_best
from meshrl.run.signals import Stop
from meshrl.tools.report.page import write_report
from meshrl.train.checkpoint_files import (
    CONTROLLER,
    Manifest,
    commit,
    make_temporary_folder,
    remove_leftovers,
    state_folder,
    states,
    write_json,
)
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

    lines, units = read_metrics(folder / "metrics.jsonl")
    written = [line.metrics["checkpoint/write_s"] for line in lines if "checkpoint/write_s" in line.metrics]
    assert len(written) == 1 and written[0] > 0  # of step 2; no step follows the checkpoint of step 4
    explained = {name: meaning_of(name) for name in units}
    assert [name for name, found in explained.items() if found is None] == []
    assert {"correction/effective_sample_size", "correction/clipped_fraction"} <= set(units)
    assert {n: units[n] or "none" for n in units} == {n: found.unit for n, found in explained.items() if found}


def _models(run: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (run / "checkpoints").glob("step_*/model"))


@pytest.mark.parametrize(
    ("keep", "left"),
    [(1, [20, 30, 50]), (2, [20, 30, 40, 50]), (9, [10, 20, 30, 40, 50]), (None, [10, 20, 30, 40, 50])],
)
def test_old_models_are_removed_unless_they_are_the_best_of_the_run_or_of_a_state(keep, left, tmp_path: Path):
    """A damaged state protects no model."""
    checkpoints = tmp_path / "checkpoints"
    for step, best in ((30, 10), (40, 20), (50, 20)):
        final = state_folder(checkpoints, step)
        fact = write_json(make_temporary_folder(final) / CONTROLLER, {"best": {"step": best, "score": 0.5}})
        commit(final, Manifest(step=step, num_ranks=0, files={CONTROLLER: fact}))
    (state_folder(checkpoints, 30) / CONTROLLER).write_text("{}")
    for step in (10, 20, 30, 40, 50):
        model_folder(tmp_path, step).mkdir(parents=True)
        (model_folder(tmp_path, step) / "model.safetensors").touch()
    replace_best(tmp_path, Best(30, 0.75, str(model_folder(tmp_path, 30))), lambda step: True)
    prune_models(tmp_path, keep)
    assert _models(tmp_path) == left
    assert {path.name for path in checkpoints.glob("step_*")} == {f"step_{step:06d}" for step in {*left, 30, 40, 50}}
    assert not list(checkpoints.glob("*/model.aside"))


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
    """P27: an export or a removal that was interrupted."""
    left, complete = tmp_path / "step_000001" / "model.aside", tmp_path / "step_000002" / "model"
    left.mkdir(parents=True)
    complete.mkdir(parents=True)
    remove_leftovers(tmp_path)
    assert complete.is_dir() and not left.parent.exists()


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
    found = Start(2, there, {"best": {"step": 1, "score": 0.5, "model": "step_000001/model"}})
    with _recorded(load_run_config(config, ["run.name=branch"])) as record:
        record.end_early()
        replace_best(record.folder, Best(3, 0.75, str(model_folder(record.folder, 3))), lambda step: True)
        assert read_best(record.folder) is not None
        record.continue_from(found)
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


HOLDER = """
import sys
from pathlib import Path
from meshrl.run.lease import FolderLease
from meshrl.monitor.status import StatusFile
lease = FolderLease(Path(sys.argv[1]))
assert lease.take()
StatusFile(Path(sys.argv[1]), 5)
print("up", flush=True)
input()
"""


@contextmanager
def _in_use(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lease of the folder, until it gets a line."""
    folder.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        yield other
        other.kill()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_the_folder_of_a_live_run_is_refused_and_stays_as_it_is(config: Path, resume: str, monkeypatch):
    """P43: a second start would move the files that the first one writes. However its process ends, it is free then."""
    monkeypatch.setattr(lease, "_WAIT_S", 0.3)
    loaded = load_run_config(config, ["run.name=used", f"run.resume={resume}"])
    folder = Path(loaded.config.run.folder) / "used"
    with _in_use(folder) as other:
        (folder / "metrics.jsonl").write_text("")
        (folder / "result.json").write_text("{}")
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(MeshrlError, match=rf"is in use by the run of process {other.pid} on ") as caught:
            train(config, "used", f"run.resume={resume}")
        assert "\n" not in str(caught.value)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with _recorded(loaded):
        pass


def test_a_start_with_resume_auto_waits_for_the_end_of_the_run_before_it(config: Path, capsys):
    """P43: a requeued job starts while the old one still saves its checkpoint."""
    loaded = load_run_config(config, ["run.name=requeued", "run.resume=auto"])
    folder = Path(loaded.config.run.folder) / "requeued"
    with _in_use(folder) as other:

        async def second() -> None:
            waiting = asyncio.create_task(wait_for_folder(loaded))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            other.communicate("\n")
            await waiting

        asyncio.run(second())
    assert f"in use by the run of process {other.pid} on {socket.gethostname()}; waiting" in capsys.readouterr().err


def test_a_process_that_an_agent_forks_does_not_hold_the_lease(tmp_path: Path):
    """It may live longer than the run."""
    held = lease.FolderLease(tmp_path)
    assert held.take()
    (forked, is_forked), (may_end, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(is_forked, b"x")
        os.read(may_end, 1)
        os._exit(0)
    try:
        os.read(forked, 1)
        assert lease.is_leased(tmp_path)
        held.release()
        assert not lease.is_leased(tmp_path)
    finally:
        os.write(end, b"x")
        os.waitpid(child, 0)


def test_two_runs_of_one_process_do_not_share_a_folder(config: Path):
    loaded = load_run_config(config, ["run.name=twice", "run.resume=auto"])
    with _recorded(loaded), pytest.raises(MeshrlError, match="twice is in use by"), _recorded(loaded):
        pytest.fail("two runs have one folder")


def test_nothing_of_an_earlier_run_is_lost_under_resume_auto_without_a_checkpoint(config: Path, tmp_path: Path, capsys):
    """P68: metrics, rollouts, the best model and its record move to earlier_1; one line states this."""
    script = tmp_path / "script"
    script.write_text("0.25 0.5 0.75")
    overrides = ("loop.num_steps=2", f"reward.terms.answer.args.script={script}")
    folder = train(config, "again", *overrides)
    shutil.rmtree(folder / "checkpoints" / "step_000002" / "state")
    shutil.rmtree(folder / "checkpoints" / "step_000001" / "state")
    (folder / "notes.txt").write_text("mine")
    (folder / "rollouts").rename(tmp_path / "other_disk")
    (folder / "rollouts").symlink_to(tmp_path / "other_disk")
    names = ("metrics.jsonl", "rollouts", "checkpoints", "result.json", "report.html", "config.yaml", "notes.txt")
    before = {str(path.relative_to(folder)): path.read_bytes() for path in _files_below(folder, names)}
    assert any(name.endswith("best.json") for name in before) and any("safetensors" in name for name in before)
    script.write_text("0.125 0.125 0.125")
    capsys.readouterr()
    train(config, "again", *overrides, "run.resume=auto")
    aside = folder / "earlier_1"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "has no checkpoint" in line]
    assert (
        line
        == f"run.resume=auto: {folder} has no checkpoint, so the run starts at step 0; what was there is now in {aside}"
    )
    assert {str(path.relative_to(aside)): path.read_bytes() for path in _files_below(aside, names)} == before
    assert len(read_metrics(folder / "metrics.jsonl")[0]) == 5
    assert len([*(tmp_path / "other_disk").iterdir()]) == 5, "the link is used again"
    assert read_best(folder) == Best(0, 0.125, str(config.parent / "model"))


def _files_below(folder: Path, names: Sequence[str]) -> list[Path]:
    found = [path for name in names for path in [folder / name, *(folder / name).rglob("*")]]
    return [path for path in found if path.is_file()]


def test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside(config: Path, tmp_path: Path):
    """P27, P68: metrics, rollouts, models and best.json of later steps."""
    script = tmp_path / "script"
    script.write_text("0.25 0.5 0.625 0.75")
    overrides = ("loop.num_steps=3", "loop.save_every_steps=1", f"reward.terms.answer.args.script={script}")
    folder = train(config, "cut", *overrides, "run.keep_checkpoints=9")
    shutil.rmtree(folder / "checkpoints" / "step_000003" / "state")
    shutil.rmtree(folder / "checkpoints" / "step_000002" / "state")
    later = {name: (folder / "rollouts" / name).read_bytes() for name in ("step_000001.jsonl", "eval_000003.jsonl")}
    best, steps = (folder / "checkpoints" / "best.json").read_text(), read_metrics(folder / "metrics.jsonl")[0]
    script.write_text("0.125 0.125")
    train(config, "cut", *overrides, "run.resume=auto")
    aside = folder / "earlier_1"
    assert all((aside / "rollouts" / name).read_bytes() == content for name, content in later.items())
    assert not (aside / "rollouts" / "step_000000.jsonl").exists()
    assert read_metrics(aside / "metrics.jsonl")[0] == [line for line in steps if line.step >= 1]
    assert (aside / "checkpoints" / "best.json").read_text() == best
    assert (aside / "checkpoints" / "step_000003" / "model" / "model.safetensors").is_file()
    assert json.loads((aside / "result.json").read_text())["steps"] == 3
    assert [line.step for line in read_metrics(folder / "metrics.jsonl")[0]] == [-1, 0, 0, 1, 1, 2, 2]
    found = read_best(folder)
    assert found is not None and (found.step, found.score) == (1, 0.5) and Path(found.model).is_dir()


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
    assert [step for step, _ in states(folder / "checkpoints")] == [1], "the training state is saved nevertheless"
    assert not list((folder / "checkpoints").glob("step_*/model*"))
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
    """P43: the next start moves its files aside. A folder with a step stays occupied."""
    loaded = load_run_config(config, ["run.name=again"])
    for number in range(2):
        with pytest.raises(RewardError), _recorded(loaded) as record:
            raise RewardError(f"a reward that can't work: {number}")
        assert json.loads((record.folder / "result.json").read_text())["status"] == "failed"
    assert "can't work: 0" in (record.folder / "earlier_1" / "result.json").read_text()
    folder = train(config, "again", "loop.num_steps=1", "data.shuffle=false")
    assert json.loads((folder / "result.json").read_text())["status"] == "done"
    with pytest.raises(MeshrlError, match=r"again .*choose another run\.name"), _recorded(loaded):
        pytest.fail("two runs have one folder")


class _Broken(Exception):
    pass


@pytest.mark.parametrize("where", ["on_step", "reward", "sink"])
def test_an_error_of_the_controller_ends_the_run_with_its_last_finished_step_saved(where, config, monkeypatch):
    """P68: as after Ctrl-C. A step that every sink has got is finished, also if one of them raises."""

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2 and where == "on_step":
            raise _Broken

    class Sink(JsonlSink):
        def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
            super().write(step, values, units)
            if step == 2 and where == "sink":
                raise _Broken

    monkeypatch.setattr("meshrl.run.live.JsonlSink", Sink)
    order = "false" if where == "reward" else "true"  # the grader fails on the row "6", the fourth one
    loaded = load_run_config(
        config,
        [f"run.name={where}", "loop.eval_every_steps=0", f"data.shuffle={order}", "loop.prompts_per_step=1"]
        + ([] if where == "reward" else ['reward.terms={"ascii": {"kind": "tiny_run:ascii_share"}}']),
    )
    with pytest.raises(RewardError if where == "reward" else _Broken):
        start.train(loaded, write_report, Objects(on_step=on_step))
    folder = Path(loaded.config.run.folder) / where
    assert [step for step, _ in states(folder / "checkpoints")] == [3]
    assert [line.step for line in read_metrics(folder / "metrics.jsonl")[0]][-3:] == [0, 1, 2]
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("failed", 3)


def test_training_states_are_saved_at_evaluations_and_every_ten_minutes_by_default(config, tmp_path, monkeypatch):
    """P68: without models, except the best and the last."""
    script = tmp_path / "script"
    script.write_text("0.5 0.25 0.25")
    options = (f"reward.terms.answer.args.script={script}", "loop.eval_every_steps=3", "run.keep_checkpoints=9")
    folder = train(config, "evals", *options)
    assert [step for step, _ in states(folder / "checkpoints")] == [3, 4]
    assert [path.parent.name for path in sorted(folder.glob("checkpoints/*/model"))] == ["step_000004"]
    monkeypatch.setattr("meshrl.run.live.AUTO_SAVE_S", 0.0)
    script.write_text("0.5 0.25")
    folder = train(config, "minutes", *options, "loop.eval_every_steps=0")
    saved = [step for step, _ in states(folder / "checkpoints")]
    assert saved[0] == 1 and saved[-1] == 4  # a save that is still being written is not waited for
    script.write_text("0.5 0.25")
    folder = train(config, "turned_off", *options, "loop.eval_every_steps=0", "loop.save_every_steps=0")
    assert [step for step, _ in states(folder / "checkpoints")] == [4]


def test_resume_auto_passes_over_damaged_checkpoints_with_a_note(config: Path, tmp_path: Path, capsys):
    """P28, P43: one with a list of files that was changed, one with a changed tensor, which the ranks find, and one
    that was saved with a NaN."""
    script = tmp_path / "script"
    script.write_text("0.5 0.25")
    overrides = ("loop.save_every_steps=1", "loop.eval_every_steps=0", f"reward.terms.answer.args.script={script}")
    folder = train(config, "damaged", *overrides, "run.keep_checkpoints=9")
    damaged = [folder / "checkpoints" / f"step_00000{step}" / "state" for step in (3, 4)]
    content = bytearray((damaged[0] / "rank_00000.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged[0] / "rank_00000.safetensors").write_bytes(content)
    (damaged[1] / "manifest.json").write_text("{}")
    state = folder / "checkpoints" / "step_000002" / "state"
    name = poison(state, tmp_path / "poisoned", "rank_00000.safetensors", "model.")
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "poisoned", state)
    capsys.readouterr()
    script.write_text("0.25")
    train(config, "damaged", *overrides, "run.resume=auto")
    text = capsys.readouterr().out
    assert f"checkpoint passed over: {damaged[1] / 'manifest.json'}" in text
    assert f"checkpoint passed over: {damaged[0] / 'rank_00000.safetensors'} is damaged" in text
    assert f"checkpoint passed over: {state} contains values that are not finite in {name}" in text
    assert f"continues from {folder / 'checkpoints' / 'step_000001' / 'state'}, after step 1" in text
    assert (folder / "earlier_1" / "checkpoints" / "step_000003" / "state").is_dir()
    assert json.loads((folder / "result.json").read_text())["steps"] == 4
