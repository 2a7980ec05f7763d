"""`meshrl status` and `meshrl stop`: they show and end a run from another terminal."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from meshrl.cli import main
from meshrl.core.errors import MeshrlError
from meshrl.monitor.spans import Spans
from meshrl.run.status import StatusFile, read_status
from meshrl.tools import status as module
from meshrl.tools.status import describe, stop
from tests.waiting import wait_until

RUNNER = """
import json, signal, sys, time
from pathlib import Path
from meshrl.run.status import StatusFile
folder = Path(sys.argv[1])
file = StatusFile(folder, 5)
def handle(number, frame):
    if sys.argv[2] == "ignores SIGTERM":
        return
    file.write(2, {"loss/nll": 0.5}, {})
    file.close()
    result = {"status": "interrupted", "error": None, "wall_s": 3.2}
    (folder / "result.json").write_text(json.dumps(result))
    sys.exit(143)
signal.signal(signal.SIGTERM, handle)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_of(tmp_path: Path):
    """Starts a process in place of a run in tmp_path; it is killed at the end."""
    started = []

    def start(how: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(tmp_path), how], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_file_follows_steps_and_phases(tmp_path):
    file = StatusFile(tmp_path, 10, first_step=3)
    assert (read_status(tmp_path).step, read_status(tmp_path).phase) == (3, "start")
    spans = Spans(entered=file.entered)
    with spans("rollout"):
        assert wait_until(lambda: read_status(tmp_path).phase == "rollout")
    assert wait_until(lambda: read_status(tmp_path).phase == "")
    file.write(3, {"reward/mean": float("nan"), "loss/policy": 1.0}, {})
    file.write(4, {"reward/mean": 0.25}, {})
    file.write(3, {"eval/mean_at_k": 1.0}, {})  # an evaluation is reported with the number of the step before it
    file.close()
    status = read_status(tmp_path)
    assert (status.step, status.num_steps, status.values) == (5, 10, {"reward/mean": 0.25})
    assert (status.pid, status.host) == (os.getpid(), socket.gethostname())
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_status_prints_step_phase_value_and_processes(tmp_path, capsys):
    file = StatusFile(tmp_path, 10)
    file.write(6, {"reward/mean": 0.625}, {})
    file.entered("train")
    assert wait_until(lambda: read_status(tmp_path).phase == "train")
    assert main(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"runs as process {os.getpid()}" in printed and "step 7 of 10, in phase train for 0 s" in printed
    assert "reward/mean 0.625" in printed
    (line,) = [line for line in printed.splitlines() if line.split()[0] == str(os.getpid())]
    assert line.split()[1] == "controller" and line.split()[3] == "MiB"


def test_status_of_a_killed_run_of_a_run_on_another_machine_and_of_a_missing_run(tmp_path, run_of, capsys):
    process = run_of("ignores SIGTERM")
    process.kill()
    process.wait()
    assert "has ended without a result" in describe(tmp_path)
    with pytest.raises(MeshrlError, match="the run is not running"):
        stop(tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"host": "elsewhere"}))
    assert "was started on elsewhere" in describe(tmp_path)
    with pytest.raises(MeshrlError, match="started on elsewhere"):
        stop(tmp_path)
    assert main(["status", str(tmp_path / "nothing")]) == 1
    assert "is not a run's folder" in capsys.readouterr().err


def test_stop_requests_the_end_and_waits_for_it(tmp_path, run_of):
    process = run_of("handles SIGTERM")
    assert stop(tmp_path).endswith("interrupted after 3 s; step 3 of 5")
    assert process.wait() == 143
    assert "interrupted after 3 s" in describe(tmp_path)


def test_stop_raises_an_error_when_a_run_does_not_end(tmp_path, run_of, monkeypatch):
    monkeypatch.setattr(module, "_STOP_S", 0.3)
    process = run_of("ignores SIGTERM")
    with pytest.raises(MeshrlError, match="still runs, in phase start"):
        stop(tmp_path)
    assert process.poll() is None


def test_another_process_with_the_id_of_an_ended_run_gets_no_signal(tmp_path, run_of):
    """The system uses ids again after a reboot, or after a long time."""
    process = run_of("handles SIGTERM")
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"started": status["started"] - 60}))
    with pytest.raises(MeshrlError, match="the run is not running"):
        stop(tmp_path)
    assert psutil.Process(process.pid).is_running() and process.poll() is None
