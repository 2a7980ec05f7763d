"""The folder of a run: its lease, what a resume moves aside, and when training states are saved in it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from poisoned_states import poison
from tiny_run import train

from meshrl.config.load import Loaded, load_run_config
from meshrl.config.run import RunConfig
from meshrl.core.best_models import Best, read_best
from meshrl.core.errors import MeshrlError, RewardError
from meshrl.monitor.sinks import JsonlSink, read_metrics
from meshrl.run import folder as lease
from meshrl.run import start
from meshrl.run.folder import Start, bytes_of, run_name, set_aside
from meshrl.run.inputs import Objects
from meshrl.run.outputs import LiveRun, live_run
from meshrl.run.signals import Stop
from meshrl.tools.report.page import write_report
from meshrl.train.checkpoint_files import (
    states,
)


def _recorded(loaded: Loaded[RunConfig]) -> AbstractContextManager[LiveRun]:
    """A run of four steps without a loop."""
    return live_run(loaded, "train", 4, Stop(), write_report)


HOLDER = """
import sys
from pathlib import Path
from meshrl.run.folder import FolderLease
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
    """A second start would move the files that the first one writes. However its process ends, it is free then."""
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
    """A requeued job starts while the old one still saves its checkpoint."""
    loaded = load_run_config(config, ["run.name=requeued", "run.resume=auto"])
    folder = Path(loaded.config.run.folder) / "requeued"
    with _in_use(folder) as other:

        async def second() -> None:
            waiting = asyncio.create_task(lease.wait_for_folder(loaded.config.run))
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


def test_the_owner_of_a_folder_without_a_status_is_a_run_that_is_starting(tmp_path: Path):
    """It takes the lease before it writes any file."""
    held = lease.FolderLease(tmp_path)
    assert held.take()
    assert "is in use by a run that is starting. Wait until" in str(lease.in_use(tmp_path))
    held.release()


def test_two_runs_of_one_process_do_not_share_a_folder(config: Path):
    loaded = load_run_config(config, ["run.name=twice", "run.resume=auto"])
    with _recorded(loaded), pytest.raises(MeshrlError, match="twice is in use by"), _recorded(loaded):
        pytest.fail("two runs have one folder")


def test_nothing_of_an_earlier_run_is_lost_under_resume_auto_without_a_checkpoint(config: Path, tmp_path: Path, capsys):
    """Metrics, rollouts, the best model and its record move to earlier_1; one line states this."""
    script = tmp_path / "script"
    script.write_text("0.25 0.5 0.75")
    overrides = ("loop.num_steps=2", f"reward.terms.answer.args.script={script}")
    folder = train(config, "again", *overrides)
    shutil.rmtree(folder / "checkpoints" / "step_000002" / "state")
    shutil.rmtree(folder / "checkpoints" / "step_000001" / "state")
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("mine")
    (folder / "data").symlink_to(tmp_path / "data")
    (folder / "latest.log").symlink_to("/nowhere")
    (folder / "rollouts").rename(tmp_path / "other_disk")
    (folder / "rollouts").symlink_to(tmp_path / "other_disk")
    (folder / "view.html").write_text("of the failed run")
    names = ("metrics.jsonl", "checkpoints", "result.json", "report.html", "view.html", "config.yaml", "run_notes.txt")
    before = {str(path.relative_to(folder)): path.read_bytes() for path in _files_below(folder, names)}
    rollouts = {path.name for path in (folder / "rollouts").iterdir()}
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
    assert {path.name for path in (tmp_path / "other_disk" / "earlier_1").iterdir()} == rollouts, "on the same disk"
    assert len([*(tmp_path / "other_disk").glob("*_0*")]) == len(rollouts) == 10
    assert (folder / "notes.txt").read_text() == (folder / "data" / "rows.jsonl").read_text() == "mine"
    best = read_best(folder)
    assert best is not None and best == Best(0, 0.125, str(config.parent / "model"), best.evaluation)


_LATER = ("step_000002.jsonl", "step_000002.tokens.parquet", "eval_000003.jsonl", "eval_000003.tokens.parquet")


def _files_below(folder: Path, names: Sequence[str]) -> list[Path]:
    found = [path for name in names for path in [folder / name, *(folder / name).rglob("*")]]
    return [path for path in found if path.is_file()]


def test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside(config: Path, tmp_path: Path):
    """Metrics, rollouts, models and best.json of later steps."""
    script = tmp_path / "script"
    script.write_text("0.25 0.5 0.625 0.75")
    overrides = ("loop.num_steps=3", "loop.save_every_steps=1", f"reward.terms.answer.args.script={script}")
    folder = train(config, "cut", *overrides, "run.keep_checkpoints=9")
    shutil.rmtree(folder / "checkpoints" / "step_000003" / "state")
    shutil.rmtree(folder / "checkpoints" / "step_000002" / "state")
    (folder / "checkpoints" / "step_000003.tar.gz").write_text("mine")
    shutil.copytree(folder / "checkpoints" / "step_000001", folder / "checkpoints" / "step_000001_mine")
    (folder / "checkpoints" / "step_000001_mine" / "state" / "manifest.json").unlink()
    later = {name: (folder / "rollouts" / name).read_bytes() for name in _LATER}
    best, steps = (folder / "checkpoints" / "best.json").read_text(), read_metrics(folder / "metrics.jsonl")[0]
    notes = (folder / "run_notes.txt").read_text()
    script.write_text("0.125 0.125")
    train(config, "cut", *overrides, "run.resume=auto")
    aside = folder / "earlier_1"
    assert read_metrics(aside / "metrics.jsonl")
    assert all((aside / "rollouts" / name).read_bytes() == content for name, content in later.items())
    assert not (aside / "rollouts" / "step_000001.jsonl").exists()
    assert read_metrics(aside / "metrics.jsonl")[0] == [line for line in steps if line.step >= 2]
    assert (aside / "checkpoints" / "best.json").read_text() == best
    assert (aside / "checkpoints" / "step_000003" / "model" / "model.safetensors").is_file()
    assert json.loads((aside / "result.json").read_text())["steps"] == 3
    assert (folder / "checkpoints" / "step_000003.tar.gz").read_text() == "mine"
    assert (folder / "checkpoints" / "step_000001_mine" / "state" / "controller.json").is_file()
    assert [line.step for line in read_metrics(folder / "metrics.jsonl")[0]] == [0, 1, 1, 2, 2, 3, 3]
    found = read_best(folder)
    assert found is not None and (found.step, found.score) == (1, 0.5) and Path(found.model).is_dir()
    continued = (folder / "run_notes.txt").read_text()
    assert continued.startswith(notes) and f"after step 1 is now in {aside}" in continued.removeprefix(notes)
    assert not (aside / "run_notes.txt").exists()


def test_runs_that_begin_in_the_same_second_get_different_names(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded = load_run_config(config, ["run.name=auto", f"run.folder={tmp_path}"])
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    names = [run_name(loaded) for _ in range(3)]
    assert names == [f"{loaded.path.stem}-20260102-030405{end}" for end in ("", "-2", "-3")]


def test_a_run_that_ended_before_its_first_step_does_not_occupy_its_name(config: Path):
    """The next start moves its files aside. A folder with a step stays occupied."""
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


def test_a_signal_after_an_error_ends_the_run_with_the_error_and_a_saved_step(config: Path):
    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            raise _Broken

    loaded = load_run_config(config, ["run.name=both", "loop.eval_every_steps=0"])
    with pytest.raises(_Broken):
        start.train(loaded, write_report, Objects(on_step=on_step))
    folder = Path(loaded.config.run.folder) / "both"
    assert [step for step, _ in states(folder / "checkpoints")] == [2]
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "_Broken: ")


@pytest.mark.slow
def test_the_own_checkpoint_of_a_run_may_be_given_by_a_relative_path(config: Path, tmp_path: Path):
    """It is then no branch: the run keeps its best model."""
    script = tmp_path / "script"
    script.write_text("0.75 0.5 0.25")
    options = (f"reward.terms.answer.args.script={script}", "run.folder=runs")
    train(config, "own", *options, "loop.num_steps=2")
    script.write_text("0.125 0.125")
    train(config, "own", *options, "run.resume=runs/own/checkpoints/step_000002", "loop.num_steps=4")
    best = read_best(Path("runs/own"))
    assert best is not None and (best.step, best.score) == (0, 0.75)


def test_a_loop_that_ends_before_its_last_step_is_an_error_of_the_run(config, monkeypatch):
    async def short(job: object) -> None: ...

    monkeypatch.setitem(start.LOOPS, "colocated", short)
    with pytest.raises(MeshrlError, match="the loop ended after step 0, which is not the last one"):
        train(config, "short", "cluster.executor=inline")


@pytest.mark.parametrize("where", ["on_step", "reward", "sink"])
def test_an_error_of_the_controller_ends_the_run_with_its_last_finished_step_saved(where, config, monkeypatch):
    """As after Ctrl-C. A step that every sink has got is finished, also if one of them raises."""

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        if step == 3 and where == "on_step":
            raise _Broken

    class Sink(JsonlSink):
        def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
            super().write(step, values, units)
            if step == 3 and where == "sink":
                raise _Broken

    monkeypatch.setattr("meshrl.run.outputs.JsonlSink", Sink)
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
    assert [line.step for line in read_metrics(folder / "metrics.jsonl")[0]][-3:] == [1, 2, 3]
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("failed", 3)


def test_a_run_that_saves_nothing_ends_by_an_error_without_a_checkpoint(config: Path):
    """The steps of `meshrl diagnose`."""

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise _Broken

    loaded = load_run_config(config, ["run.name=unsaved", "loop.eval_every_steps=0"])
    with pytest.raises(_Broken):
        start.train(loaded, write_report, Objects(on_step=on_step, saves=False))
    folder = Path(loaded.config.run.folder) / "unsaved"
    assert states(folder / "checkpoints") == []
    assert "ended by _Broken after step 2; there is nothing to save\n" in (folder / "run_notes.txt").read_text()


@pytest.mark.slow
def test_training_states_are_saved_at_evaluations_and_every_ten_minutes_by_default(config, tmp_path, monkeypatch):
    """Without models, except the best and the last."""
    script = tmp_path / "script"
    script.write_text("0.5 0.25 0.25")
    options = (f"reward.terms.answer.args.script={script}", "loop.eval_every_steps=3", "run.keep_checkpoints=9")
    folder = train(config, "evals", *options)
    assert [step for step, _ in states(folder / "checkpoints")] == [3, 4]
    assert [path.parent.name for path in sorted(folder.glob("checkpoints/*/model"))] == ["step_000004"]
    monkeypatch.setattr("meshrl.run.keeper.AUTO_SAVE_S", 0.0)
    script.write_text("0.5 0.25")
    folder = train(config, "minutes", *options, "loop.eval_every_steps=0")
    saved = [step for step, _ in states(folder / "checkpoints")]
    assert saved[0] == 1 and saved[-1] == 4  # a save that is still being written is not waited for
    script.write_text("0.5 0.25")
    folder = train(config, "turned_off", *options, "loop.eval_every_steps=0", "loop.save_every_steps=0")
    assert [step for step, _ in states(folder / "checkpoints")] == [4]


@pytest.mark.slow
def test_resume_auto_passes_over_damaged_checkpoints_with_a_note(config: Path, tmp_path: Path, capsys):
    """One with a list of files that was changed, one with a changed tensor, which the ranks find, and one
    that was saved with a NaN."""
    script = tmp_path / "script"
    script.write_text("0.5 0.25")
    overrides = ("loop.save_every_steps=1", "loop.eval_every_steps=0", f"reward.terms.answer.args.script={script}")
    folder = train(config, "damaged", *overrides, "run.keep_checkpoints=9")
    damaged = [folder / "checkpoints" / f"step_00000{step}" / "state" for step in (3, 4)]
    content = bytearray((damaged[0] / "policy_rank_00000.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged[0] / "policy_rank_00000.safetensors").write_bytes(content)
    (damaged[1] / "manifest.json").write_text("{}")
    state = folder / "checkpoints" / "step_000002" / "state"
    name = poison(state, tmp_path / "poisoned", "policy_rank_00000.safetensors", "model.")
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "poisoned", state)
    capsys.readouterr()
    script.write_text("0.25")
    train(config, "damaged", *overrides, "run.resume=auto")
    text = capsys.readouterr().out
    assert f"checkpoint passed over: {damaged[1] / 'manifest.json'}" in text
    assert f"checkpoint passed over: {damaged[0] / 'policy_rank_00000.safetensors'} is damaged" in text
    assert f"checkpoint passed over: {state} contains values that are not finite in {name}" in text
    assert f"continues from {folder / 'checkpoints' / 'step_000001' / 'state'}, after step 1" in text
    assert (folder / "earlier_1" / "checkpoints" / "step_000003" / "state").is_dir()
    assert json.loads((folder / "result.json").read_text())["steps"] == 4


def test_thumbnails_move_with_the_rollouts_of_an_earlier_run_and_stay_for_one_that_continues(tmp_path: Path):
    image = tmp_path / "rollouts" / "images" / "a.jpg"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"12345")
    assert bytes_of(tmp_path) == 5
    set_aside(tmp_path, Start(2, tmp_path, {}))
    assert image.exists()
    set_aside(tmp_path, None)
    assert not image.exists() and (tmp_path / "earlier_1" / "rollouts" / "images" / "a.jpg").exists()
