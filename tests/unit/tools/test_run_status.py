"""`meshrl status` and `meshrl stop`: they show and end a run from another terminal."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.core.errors import MeshrlError
from meshrl.monitor.recorder import Spans
from meshrl.monitor.sinks import JsonlSink
from meshrl.monitor.status import RankProcess, StatusFile, read_status
from meshrl.run.folder import FolderLease, is_leased
from meshrl.tools import runs as module
from meshrl.tools.runs import describe, stop
from tests.waiting import wait_until

RUNNER = """
import json, signal, sys, time
from pathlib import Path
from meshrl.run.folder import FolderLease
from meshrl.monitor.status import StatusFile
folder = Path(sys.argv[1])
lease = FolderLease(folder)
lease.take()
file = StatusFile(folder, 5)
def handle(number, frame):
    if sys.argv[2] == "ignores SIGTERM":
        return
    file.write(3, {"loss/nll": 0.5}, {})
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
    file.write(4, {"reward/mean": float("nan"), "loss/policy": 1.0}, {})
    file.write(5, {"reward/mean": 0.25}, {})
    file.write(5, {"eval/mean_at_k": 1.0}, {})
    file.close()
    status = read_status(tmp_path)
    assert (status.step, status.num_steps, status.values) == (5, 10, {"reward/mean": 0.25})
    assert (status.pid, status.host) == (os.getpid(), socket.gethostname())
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_status_prints_step_phase_value_and_processes(tmp_path, capsys):
    file, lease = StatusFile(tmp_path, 10), FolderLease(tmp_path)
    assert lease.take()
    file.write(7, {"reward/mean": 0.625}, {})
    file.entered("train")
    assert wait_until(lambda: read_status(tmp_path).phase == "train")
    assert main(["status", str(tmp_path)]) == 0
    lease.release()
    printed = capsys.readouterr().out
    assert f"runs as process {os.getpid()}" in printed and "7 of 10 steps, in phase train for 0 s" in printed
    assert "reward/mean 0.625" in printed
    (line,) = [line for line in printed.splitlines() if line.split()[0] == str(os.getpid())]
    assert line.split()[1] == "controller" and line.split()[3] == "MiB"


def test_status_lists_the_processes_of_all_machines(tmp_path, monkeypatch):
    """Those of this machine are checked: one has ended, and one has got the process id of a rank. Those of other
    machines are named with their machine; from there, so is the controller."""
    file, lease, here = StatusFile(tmp_path, 10), FolderLease(tmp_path), socket.gethostname()
    assert lease.take()
    started = "import time; print('up', flush=True); time.sleep(600)"
    words = ["-c", started, "meshrl.cluster.worker", "rank_1"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, start_new_session=True) as rank:
        assert rank.stdout.readline()
        ranks = [
            RankProcess(here, rank.pid, "rank_1", "trains"),
            RankProcess(here, os.getppid(), "rank_2", "trains"),
            RankProcess("far", 77, "rank_3", "samples"),
            RankProcess("far", 78, "other", "rank_3"),
        ]
        file.show_processes(lambda: ranks)
        file.entered("train")
        assert wait_until(lambda: len(read_status(tmp_path).ranks) == 4)
        near = [line.split() for line in describe(tmp_path).splitlines()]
        monkeypatch.setattr(socket, "gethostname", lambda: "far")
        far = [line.split() for line in describe(tmp_path).splitlines()]
        rank.kill()
    lease.release()
    assert [str(rank.pid), "rank_1", "MiB", "trains"] in [[*line[:2], *line[3:]] for line in near]
    assert [str(os.getppid()), "rank_2", "has", "ended"] in near
    unchecked = ["on", "far,", "not", "checked", "from", "here"]
    assert ["77", "rank_3", *unchecked, "samples"] in near and ["78", "other", *unchecked, "rank_3"] in near
    unchecked[1] = f"{here},"
    assert [str(os.getpid()), "controller", *unchecked] in far and [
        str(rank.pid),
        "rank_1",
        *unchecked,
        "trains",
    ] in far
    assert ["77", "rank_3", "has", "ended"] in far


@pytest.mark.parametrize("pid", [-1, 0, 1 << 40, "7", True])
def test_a_status_with_a_wrong_process_of_a_rank_is_damaged(tmp_path, pid):
    file = StatusFile(tmp_path, 10)
    file.show_processes(lambda: [RankProcess("far", pid, "rank_0", "trains")])
    file.close()
    with pytest.raises(MeshrlError, match=r"status\.json: not the status of a run"):
        read_status(tmp_path)


@pytest.mark.parametrize("pid", [-1, 0, 1, True, 2**31, 10**40, "1", None, 1.5])
def test_no_process_is_stopped_by_a_damaged_status(tmp_path, pid):
    """Signals to -1 and 0 are sent to many processes."""
    StatusFile(tmp_path, 10).close()
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"pid": pid}))
    with pytest.raises(MeshrlError, match=r"status\.json: not the status of a run"):
        stop(tmp_path)


def test_status_of_a_killed_run_of_a_run_on_another_machine_and_of_a_missing_run(tmp_path, run_of, capsys):
    process = run_of("ignores SIGTERM")
    process.kill()
    process.wait()
    assert "has ended without a result" in describe(tmp_path)
    with pytest.raises(MeshrlError, match="the run is not running"):
        stop(tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"host": "elsewhere"}))
    there = f"it may run: use `meshrl status {tmp_path}` on elsewhere)"
    assert f"(If the file system does not share locks, {there}" in describe(tmp_path)
    other = run_of("ignores SIGTERM")
    (tmp_path / "status.json").write_text(json.dumps(status | {"host": "elsewhere"}))
    assert f"runs as process {process.pid} on elsewhere" in describe(tmp_path)
    with pytest.raises(MeshrlError, match="the run runs on elsewhere"):
        stop(tmp_path)
    assert other.poll() is None
    assert main(["status", str(tmp_path / "nothing")]) == 1
    assert "nothing does not exist; give the folder of a run" in capsys.readouterr().err


def test_status_shows_the_verdict_and_the_last_important_notes(tmp_path):
    StatusFile(tmp_path, 10).close()
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, score in ((0, 0.5), (4, 0.0)):
        sink.write(step, {"eval/mean_at_k": score, "eval/standard_error": 0.05}, {})
    sink.close()
    notes = ["ready after 3 s", *(f"rank {i} was lost\x1b[2J" for i in range(9)), "eval after 4 steps: mean@1 0.000"]
    path = tmp_path / "run_notes.txt"
    path.write_text("".join(f"2026-11-24 14:30:00  {note}\n" for note in notes))
    lines = describe(tmp_path).splitlines()
    assert "held-out 0.500 -> 0.000 (worse: -0.500 +- 0.139)" in lines
    assert lines[-9] == f"... 1 more in {path}" and [line.split()[3] for line in lines[-8:]] == [*"12345678"]
    path.write_bytes(b"2026-11-24 14:30:00  \xff")
    assert "not UTF-8 at byte 21" in describe(tmp_path)


def test_stop_requests_the_end_and_waits_for_it(tmp_path, run_of):
    process = run_of("handles SIGTERM")
    assert stop(tmp_path).endswith("interrupted after 3 s; 3 of 5 steps")
    assert process.wait() == 143
    assert "interrupted after 3 s" in describe(tmp_path)


def test_stop_does_not_wait_for_a_run_that_takes_the_folder_over(tmp_path, run_of):
    """A requeued job takes the lease as soon as the earlier process has ended."""
    process, next_run = run_of("handles SIGTERM"), FolderLease(tmp_path)

    waiting = threading.Thread(target=lambda: wait_until(lambda: _took(next_run)))
    waiting.start()
    assert "3 of 5 steps" in stop(tmp_path)
    waiting.join()
    assert process.wait() == 143 and is_leased(tmp_path)
    next_run.release()


def _took(lease: FolderLease) -> bool:
    try:
        return lease.take()
    except MeshrlError:
        return False


def test_stop_raises_an_error_when_a_run_does_not_end(tmp_path, run_of, monkeypatch):
    monkeypatch.setattr(module, "_STOP_S", 0.3)
    process = run_of("ignores SIGTERM")
    with pytest.raises(MeshrlError, match="still runs, in phase start"):
        stop(tmp_path)
    assert process.poll() is None


def test_a_live_run_is_found_after_the_clock_was_set(tmp_path, run_of):
    """The start time in the file is not compared with that of the process."""
    process = run_of("handles SIGTERM")
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"started": status["started"] - 7200}))
    assert f"runs as process {process.pid}" in describe(tmp_path)
    assert "3 of 5 steps" in stop(tmp_path) and process.wait() == 143


def test_a_process_that_does_not_hold_the_lease_gets_no_signal(tmp_path, run_of):
    """The id in the file may be that of another container, or the system may have used it again."""
    run_of("handles SIGTERM")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        status = json.loads((tmp_path / "status.json").read_text())
        (tmp_path / "status.json").write_text(json.dumps(status | {"pid": other.pid}))
        with pytest.raises(MeshrlError, match=f"process {other.pid} of this machine does not hold its lease"):
            stop(tmp_path)
        assert other.poll() is None
        other.communicate(b"\n")
    assert "MiB" not in describe(tmp_path)


def test_another_user_can_neither_hold_the_lease_nor_see_it(tmp_path):
    """A reader of the file could lock it, and so keep the run from starting."""
    lease = FolderLease(tmp_path)
    assert lease.take()
    assert lease.path.stat().st_mode & 0o777 == 0o600
    assert is_leased(tmp_path)
    lease.release()
    lease.release()
    assert not is_leased(tmp_path)
