"""`meshrl status` and `meshrl stop`: what a run's folder tells another terminal."""

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
from meshrl.run.status import StatusFile
from meshrl.tools import status as module
from meshrl.tools.status import describe, read_status, stop

PATIENT = """
import json, signal, sys, time
from pathlib import Path
from meshrl.run.status import StatusFile
folder = Path(sys.argv[1])
file = StatusFile(folder, 5)
def heard(number, frame):
    if sys.argv[2] == "deaf":
        return
    file.write(2, {"loss/nll": 0.5}, {})
    file.close()
    told = {"status": "interrupted", "error": None, "wall_s": 3.2}
    (folder / "result.json").write_text(json.dumps(told))
    sys.exit(143)
signal.signal(signal.SIGTERM, heard)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_of(tmp_path: Path):
    """Starts a process that stands for a run in tmp_path; killed at the end."""
    started = []

    def start(how: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT, str(tmp_path), how], stdout=subprocess.PIPE, text=True
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
        assert read_status(tmp_path).phase == "rollout"
    assert read_status(tmp_path).phase == ""
    file.write(3, {"reward/mean": float("nan"), "loss/policy": 1.0}, {})
    file.write(4, {"reward/mean": 0.25}, {})
    file.write(3, {"eval/mean_at_k": 1.0}, {})  # an evaluation is reported under the step before
    told = read_status(tmp_path)
    assert (told.step, told.num_steps, told.shown, told.value) == (5, 10, "reward/mean", 0.25)
    assert (told.pid, told.host) == (os.getpid(), socket.gethostname())
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_status_tells_step_phase_value_and_processes(tmp_path, capsys):
    file = StatusFile(tmp_path, 10)
    file.write(6, {"reward/mean": 0.625}, {})
    file.entered("train")
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"runs as process {os.getpid()}" in said and "step 7 of 10, in phase train for 0 s" in said
    assert "reward/mean 0.625" in said
    (line,) = [line for line in said.splitlines() if line.split()[0] == str(os.getpid())]
    assert line.split()[1] == "controller" and line.split()[3] == "MB"


def test_status_of_a_run_that_was_killed_of_another_machine_and_of_no_run(tmp_path, run_of, capsys):
    process = run_of("deaf")
    process.kill()
    process.wait()
    assert "has ended without a result" in describe(tmp_path)
    with pytest.raises(MeshrlError, match="nothing runs there"):
        stop(tmp_path)
    told = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(told | {"host": "elsewhere"}))
    assert "was started on elsewhere" in describe(tmp_path)
    with pytest.raises(MeshrlError, match="started on elsewhere"):
        stop(tmp_path)
    assert main(["status", str(tmp_path / "nothing")]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err


def test_stop_asks_and_waits_for_the_end(tmp_path, run_of):
    process = run_of("obedient")
    assert stop(tmp_path).endswith("interrupted after 3 s; step 3 of 5")
    assert process.wait() == 143
    assert "interrupted after 3 s" in describe(tmp_path)


def test_stop_says_when_a_run_does_not_end(tmp_path, run_of, monkeypatch):
    monkeypatch.setattr(module, "_STOP_S", 0.3)
    process = run_of("deaf")
    with pytest.raises(MeshrlError, match="still runs, in phase start"):
        stop(tmp_path)
    assert process.poll() is None


def test_a_process_that_got_the_id_of_a_run_that_is_gone_is_left_alone(tmp_path, run_of):
    """Ids come back after a reboot, or a long time."""
    process = run_of("obedient")
    told = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(told | {"started": told["started"] - 60}))
    with pytest.raises(MeshrlError, match="nothing runs there"):
        stop(tmp_path)
    assert psutil.Process(process.pid).is_running() and process.poll() is None
