"""`meshrl status` and `meshrl stop` from another terminal, on a real run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tiny_run import write_run

from meshrl.cli import main
from meshrl.tools.status import read_status
from meshrl.train.checkpoint_files import states


@contextmanager
def _running(tmp_path: Path, name: str) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """A run without end that has made two steps: its controller, its folder, and the file of what it says."""
    config, folder, told = write_run(tmp_path), tmp_path / "runs" / name, tmp_path / "told.txt"
    command = [sys.executable, "-m", "meshrl", "train", str(config), "loop.num_steps=100000", f"run.name={name}"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with (
        told.open("w") as file,
        subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
        ) as run,
    ):
        try:
            while not (folder / "status.json").exists() or read_status(folder).step < 2:
                assert run.poll() is None, told.read_text()
                time.sleep(0.1)
            yield run, folder, told
        finally:
            run.kill()


@pytest.mark.timeout(600)
def test_a_sigterm_for_all_processes_of_a_run_ends_it_with_a_checkpoint_too(tmp_path: Path):
    """P31: schedulers send it to the whole group; the ranks leave it to the controller."""
    with _running(tmp_path, "group") as (run, folder, told):
        for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # it has ended with another one
                process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, told.read_text()
    assert [step for step, _ in states(folder / "checkpoints")] == [read_status(folder).step], told.read_text()


@pytest.mark.timeout(600)
def test_a_run_tells_where_it_is_and_ends_with_a_checkpoint_when_asked(tmp_path: Path, capsys):
    """P31: its processes end with it."""
    with _running(tmp_path, "long") as (run, folder, told):
        children = psutil.Process(run.pid).children(recursive=True)
        assert main(["status", str(folder)]) == 0
        said = capsys.readouterr().out
        assert f"runs as process {run.pid}" in said and "of 100000" in said and "reward/mean" in said
        assert all(f"  {name}  " in said for name in ("controller", "rank_0", "reward"))
        assert main(["stop", str(folder)]) == 0
        assert "interrupted after" in capsys.readouterr().out
        assert run.wait() == 143 and "ended by SIGTERM" in told.read_text()
    steps = [step for step, _ in states(folder / "checkpoints")]
    assert steps == [read_status(folder).step] and steps[0] >= 2, told.read_text()
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert main(["stop", str(folder)]) == 1
    assert "nothing runs there" in capsys.readouterr().err
