"""`meshrl status` and `meshrl stop` from another process, a lost terminal, and a SIGTERM to torchrun, on a real run."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_run import steps_of, write_run
from torchrun_runs import WAITING_LOSS, enter_update, processes_of_run, start_torchrun, train_by_torchrun

from meshrl.cli import main
from meshrl.monitor.status import read_status
from meshrl.train.checkpoint_files import states
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # tests/unit/tools/test_run_status.py has quick ones


def _start(folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """`meshrl train` of a run named long, in the folder of its config. options: of Popen."""
    command = [sys.executable, "-m", "meshrl", "train", "config.yaml", "loop.num_steps=100000", "run.name=long"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, **options)


def _await_steps(run: subprocess.Popen[bytes], folder: Path, output: Callable[[], str]) -> list[psutil.Process]:
    """Wait until it has finished two steps, and read its output. Returns its child processes."""
    while not (folder / "status.json").exists() or read_status(folder).step < 2:
        shown = output()
        assert run.poll() is None, shown
        time.sleep(0.1)
    return psutil.Process(run.pid).children(recursive=True)


def _saved_step(folder: Path) -> int:
    """The step of its only checkpoint, which is its last finished step."""
    ((step, _),) = states(folder / "checkpoints")
    assert step == read_status(folder).step >= 2
    return step


def test_status_prints_the_state_of_a_run_and_stop_ends_it_with_a_checkpoint(tmp_path: Path, capsys):
    """All its processes end."""
    write_run(tmp_path)
    folder, output = tmp_path / "runs" / "long", tmp_path / "output.txt"
    with (
        output.open("w") as file,
        _start(tmp_path, stdout=file, stderr=file, start_new_session=True) as run,
    ):
        try:
            children = _await_steps(run, folder, output.read_text)
            assert main(["status", str(folder)]) == 0
            printed = capsys.readouterr().out
            assert f"runs as process {run.pid}" in printed and "of 100000" in printed and "reward/mean" in printed
            assert all(f"  {name}  " in printed for name in ("controller", "rank_0", "reward"))
            assert main(["stop", str(folder)]) == 0
            assert "interrupted after" in capsys.readouterr().out
            assert run.wait() == 143 and "ended by SIGTERM" in output.read_text()
        finally:
            run.kill()
    _saved_step(folder)
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert main(["stop", str(folder)]) == 1
    assert "the run is not running" in capsys.readouterr().err


def test_a_stopped_run_is_not_started_again_by_torchrun_or_slurm_but_by_its_user(tmp_path: Path, capsys):
    """A failed one would be: torchrun takes each exit code except 0 for a failure."""
    config, folder = write_run(tmp_path), tmp_path / "runs" / "long"
    layout = ("cluster.num_train_ranks=2", "run.resume=auto")
    (run,) = start_torchrun(config, "long", "loop.num_steps=100000", *layout, nodes=1, ranks=2, max_restarts=3)
    try:
        while not (folder / "status.json").exists() or read_status(folder).step < 2:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.1)
        assert main(["stop", str(folder)]) == 0
        output, _ = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 0 and "meshrl: ended by SIGTERM" in output, output
    assert output.count("starting 2 train ranks") == 1 and processes_of_run("long") == []
    step, overrides = _saved_step(folder), (*layout, "loop.num_steps=1000000")
    (again,) = start_torchrun(config, "long", *overrides, nodes=1, ranks=2, SLURM_RESTART_COUNT="1")
    output, _ = again.communicate()
    assert again.returncode == 0 and output.count("`meshrl stop` has ended") == 2, output
    assert read_status(folder).step == step
    train_by_torchrun(config, "long", *layout, f"loop.num_steps={step + 1}", nodes=1, ranks=2)
    assert len(steps_of(folder)) == step + 1 and not (folder / "stopped").exists()


def test_a_run_that_loses_its_terminal_ends_with_a_checkpoint(tmp_path: Path):
    """The kernel and the shell send SIGHUP to all its processes, and each print to the terminal fails; stderr is a file
    here."""
    write_run(tmp_path)
    folder, errors = tmp_path / "runs" / "long", tmp_path / "errors.txt"
    controller, terminal = pty.openpty()
    os.set_blocking(controller, False)
    shown = bytearray()

    def show() -> str:
        with suppress(BlockingIOError):
            while read := os.read(controller, 65536):
                shown.extend(read)
        return shown.decode(errors="replace") + errors.read_text()

    with errors.open("w") as file:

        def take_terminal() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it for all children
            os.login_tty(terminal)
            os.dup2(file.fileno(), 2)

        run = _start(tmp_path, preexec_fn=take_terminal)
    os.close(terminal)
    try:
        children = _await_steps(run, folder, show)
        assert wait_until(lambda: "reward" in show()), "the panel shows a step a moment after status.json"
        os.close(controller)
        os.killpg(run.pid, signal.SIGHUP)
        assert run.wait() == 129, errors.read_text()
    finally:
        run.kill()
    assert errors.read_text().endswith("meshrl: ended by SIGHUP\n")
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("interrupted", _saved_step(folder))
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_a_sigterm_to_torchrun_in_an_update_ends_the_run_with_a_checkpoint(tmp_path: Path):
    """The run then continues from there. torchrun sends the signal to the processes of all ranks."""
    config, folder, wait = write_run(tmp_path), tmp_path / "runs" / "long", tmp_path / "wait"
    layout = ("cluster.num_train_ranks=2", *WAITING_LOSS)
    (run,) = start_torchrun(config, "long", "loop.num_steps=100000", *layout, nodes=1, ranks=2)

    def check() -> None:
        assert run.poll() is None, run.communicate()[0]

    try:
        enter_update(folder, wait, check)
        run.send_signal(signal.SIGTERM)
        time.sleep(1)  # the run must not end before its update
        check()
        wait.unlink()
        output, _ = run.communicate()
    finally:
        run.kill()
    assert run.returncode != 0 and "meshrl: ended by SIGTERM" in output
    assert processes_of_run("long") == []
    step = _saved_step(folder)
    overrides = (f"loop.num_steps={step + 1}", "run.resume=auto")
    train_by_torchrun(config, "long", *overrides, *layout, nodes=1, ranks=2)
    assert len(steps_of(folder)) == step + 1
