"""Trackers and own sinks get the same values as metrics.jsonl. These tests use the real packages, offline; those that
are not installed are skipped (pip install 'meshrl[trackers]')."""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from file_limits import no_file_above

from meshrl.config.monitor import MonitorConfig
from meshrl.core.errors import ConfigError
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.trackers import open_trackers, prometheus_name

UNITS = {"eval/mean_at_k": "score", "reward/mean": "", "train/grad_norm": "norm"}


def write_a_little(cfg: MonitorConfig, folder: Path) -> list[str]:
    """Write an evaluation before the first step, the step, and an evaluation after it; returns the notes."""
    notes: list[str] = []
    for sink in open_trackers(cfg, folder, {"model": {"path": "a_model_of_this_test"}}, notes.append, FailedWrites()):
        sink.write(0, {"eval/mean_at_k": 0.25}, UNITS)
        sink.write(1, {"reward/mean": 0.5, "train/grad_norm": math.nan}, UNITS)
        sink.write(1, {"eval/mean_at_k": 0.75}, UNITS)
        sink.close()
    return notes


def test_tensorboard_counts_finished_steps(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (note,) = write_a_little(MonitorConfig(sinks=["tensorboard", "tensorboard"]), tmp_path)
    assert note == f"tensorboard: tensorboard --logdir {tmp_path / 'tensorboard'}"
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found["eval/mean_at_k"] == [(0, 0.25), (1, 0.75)]
    assert found["reward/mean"] == [(1, 0.5)]
    assert found["train/grad_norm"][0][0] == 1 and math.isnan(found["train/grad_norm"][0][1])


def test_failed_writes_of_tensorboard_are_counted_and_a_new_file_has_the_later_steps(
    tmp_path: Path,
):
    """A file-size limit in place of a full disk: it truncates a record, at which readers of that file stop."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writes, folder = FailedWrites(), tmp_path / "tensorboard"
    folder.touch()
    with pytest.raises(ConfigError, match="Remove what is in the place of RUN/tensorboard"):
        open_trackers(MonitorConfig(sinks=["tensorboard"]), tmp_path, {}, print, writes)
    folder.unlink()
    (sink,) = open_trackers(MonitorConfig(sinks=["tensorboard"]), tmp_path, {}, lambda text: None, writes)
    sink.write(2, {"reward/mean": 0.0}, UNITS)
    (events,) = folder.iterdir()
    with no_file_above(events.stat().st_size + 20):
        sink.write(3, {"reward/mean": 0.0}, UNITS)
    sink.write(4, {"reward/mean": 0.0}, UNITS)
    sink.close()
    assert writes.counts == {"tensorboard": 1}
    read = EventAccumulator(str(folder))
    read.Reload()
    assert [event.step for event in read.Scalars("reward/mean")] == [2, 4]


def test_repeated_steps_of_tensorboard_are_there_once(tmp_path: Path):
    """Those that a run repeats after it went back to a checkpoint, and those of a later process that resumes it."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, steps in ((0, (0, 1, 1, 2, 3, 2)), (2, (2, 3))):
        cfg, note = MonitorConfig(sinks=["tensorboard"]), list[str]().append
        (sink,) = open_trackers(cfg, tmp_path, {}, note, FailedWrites(), first)
        for i, step in enumerate(steps):
            sink.write(step, {"eval/mean_at_k" if i in (0, 2) and step < 2 else "reward/mean": i}, UNITS)
        sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    found = {
        name: [(event.step, event.value) for event in read.Scalars(name)] for name in ("eval/mean_at_k", "reward/mean")
    }
    assert found == {"eval/mean_at_k": [(0, 0), (1, 2)], "reward/mean": [(1, 1), (2, 0), (3, 1)]}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The package without a login. Its service writes until its teardown, and stores settings until then."""
    package = pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc there
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    yield package
    package.teardown()


def test_wandb_keeps_an_offline_run_below_the_runs_folder(tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (note,) = write_a_little(MonitorConfig(sinks=["wandb"], wandb_project="a_project_of_this_test"), tmp_path)
    wandb.teardown()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert note == f"wandb: offline; upload it with: wandb sync {written.parent}"
    raw = written.read_bytes()
    words = (tmp_path.name, "a_project_of_this_test", "a_model_of_this_test", "eval/mean_at_k", "train/grad_norm")
    for word in words:
        assert word.encode() in raw, word


def test_a_run_that_continues_in_its_folder_continues_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run in another folder, or one whose files were moved aside, begins another one."""
    begun: list[dict[str, Any]] = []

    def init(**arguments: Any) -> Any:
        begun.append(arguments)
        return SimpleNamespace(define_metric=lambda *_, **__: None, dir="", offline=False, url="its page")

    package = SimpleNamespace(init=init, Settings=dict, errors=SimpleNamespace(Error=OSError))
    monkeypatch.setitem(sys.modules, "wandb", package)
    for name in ("one", "one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        open_trackers(MonitorConfig(sinks=["wandb"]), tmp_path / name, {}, print, FailedWrites())
    (tmp_path / "one" / "wandb").rename(tmp_path / "earlier_1")
    open_trackers(MonitorConfig(sinks=["wandb"]), tmp_path / "one", {}, print, FailedWrites())
    first, again, other, last = (each["id"] for each in begun)
    assert first == again and len({first, other, last}) == 3
    assert {each["resume"] for each in begun} == {"allow"}


def test_wandb_without_a_login_raises_an_error_with_instructions(tmp_path: Path, wandb: Any):
    with pytest.raises(ConfigError, match=r"(?s)No API key.*wandb login.*WANDB_MODE=offline"):
        open_trackers(MonitorConfig(sinks=["wandb"]), tmp_path, {}, print, FailedWrites())


def test_prometheus_reads_the_newest_values_until_the_run_ends(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        cfg = MonitorConfig(sinks=["prometheus"], prometheus_port=free.getsockname()[1])
    notes = list[str]()
    (sink,) = open_trackers(cfg, tmp_path, {}, notes.append, FailedWrites())
    sink.write(1, {"reward/mean": 0.5, "train/grad_norm": math.nan}, UNITS)
    sink.write(2, {"reward/mean": 0.75}, UNITS)
    (url,) = re.findall(r"http\S+", notes[0])
    with urlopen(url) as answer:
        lines = answer.read().decode().splitlines()
    run = f'{{run="{tmp_path.name}"}}'
    assert f"meshrl_reward_mean{run} 0.75" in lines and f"meshrl_step{run} 2.0" in lines
    assert f"meshrl_train_grad_norm{run} NaN" in lines
    with pytest.raises(ConfigError, match=r"prometheus.*in use\n.*monitor.prometheus_port"):
        open_trackers(cfg, tmp_path, {}, print, FailedWrites())
    sink.close()
    with pytest.raises(OSError):
        urlopen(url)


def test_the_dashboard_of_grafana_shows_metrics_that_a_run_has():
    dashboard = json.loads(Path("examples/grafana/meshrl.json").read_text())
    shown = [target["expr"].partition("{")[0] for panel in dashboard["panels"] for target in panel["targets"]]
    metrics = Path("docs/metrics.md").read_text()
    names = {prometheus_name(name): name for name in re.findall(r"`([a-z_]+/[a-z0-9_/]+)`", metrics)}
    assert shown and all(meaning_of(names[each]) for each in shown)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert [each["name"] for each in dashboard["templating"]["list"]] == ["source", "run"]


class Remembers:
    """A user's sink."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        self.written: list[tuple[int, dict[str, float]]] = []
        self.opened, self.ended = (folder, config), list[bool]()
        OWN.append(self)

    def write(self, step: int, values: dict[str, float], units: dict[str, str]) -> None:
        if step == 3:
            raise OSError("no room")
        self.written.append((step, values))

    def close(self, failed: bool) -> None:
        self.ended.append(failed)


def no_sink(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    return config


OWN = list[Remembers]()


def test_a_users_sink_gets_the_values_and_may_fail_to_write(tmp_path: Path):
    writes, own = FailedWrites(), f"{__name__}:Remembers"
    (sink,) = open_trackers(MonitorConfig(sinks=[own]), tmp_path, {"a": 1}, print, writes)
    sink.write(2, {"reward/mean": 0.5}, UNITS)
    sink.write(3, {"reward/mean": 0.5}, UNITS)
    sink.close(True)
    (made,) = OWN
    assert made.opened == (tmp_path, {"a": 1}) and made.written == [(2, {"reward/mean": 0.5})]
    assert made.ended == [True] and writes.counts == {own: 1}
    with pytest.raises(ConfigError, match="lacks write or close"):
        open_trackers(MonitorConfig(sinks=[f"{__name__}:no_sink"]), tmp_path, {"a": 1}, print, writes)


CONFIG = {"model": {"path": "m" * 9000}, "reward": {"terms": {}}}
NAMES = {"reward/mean": 0.5, "reward/term/a+b": math.nan, "run/x": math.inf}


def test_mlflow_continues_its_run_and_a_failed_write_does_not_end_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    writes = FailedWrites()
    for steps in ((0, 1), (1, 2)):
        (sink,) = open_trackers(MonitorConfig(sinks=["mlflow"]), tmp_path, CONFIG, print, writes)
        for step in steps:
            sink.write(step, NAMES, UNITS)
        monkeypatch.setattr(mlflow, "log_metrics", lambda *_: mlflow.no_such_call)
        sink.write(9, NAMES, UNITS)
        monkeypatch.undo()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
        sink.close(failed=steps == (0, 1))
    assert writes.counts == {"mlflow": 2}
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("meshrl").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["model.path"] == "m" * 6000
    assert {each.step for each in client.get_metric_history(run.info.run_id, "reward/mean")} == {0, 1, 2}
    assert "reward/term/a_b" in run.data.metrics


def test_swanlab_and_trackio_write_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "curves"))  # read by the import
    for name in ("swanlab", "trackio"):
        pytest.importorskip(name)
    for failed in (True, False):
        writes, notes = FailedWrites(), list[str]()
        opened = open_trackers(MonitorConfig(sinks=["swanlab", "trackio"]), tmp_path, CONFIG, notes.append, writes)
        for sink in opened:
            sink.write(1, NAMES, UNITS)
            sink.close(failed)
        assert not writes.counts and len(notes) == 2
    import sqlite3

    (database,) = (tmp_path / "curves").glob("*.db")
    with sqlite3.connect(database) as read:
        rows = read.execute("select run_name, step, metrics from metrics").fetchall()
    assert len(rows) == 2 and len({name for name, *_ in rows}) == 1
    assert b"reward/mean" in rows[0][2] and rows[0][1] == 1
    assert len(list((tmp_path / "swanlab").glob("run-*"))) == 2  # two parts of one run: their names end with its id
