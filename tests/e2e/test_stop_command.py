"""`meshrl status` and `meshrl stop` from another process, on a real run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_run import write_run

from meshrl.cli import main
from meshrl.run.status import read_status
from meshrl.train.checkpoint_files import states


@pytest.mark.timeout(600)
def test_status_prints_the_state_of_a_run_and_stop_ends_it_with_a_checkpoint(tmp_path: Path, capsys):
    """P31: all its processes end."""
    config, folder, output = write_run(tmp_path), tmp_path / "runs" / "long", tmp_path / "output.txt"
    command = [sys.executable, "-m", "meshrl", "train", str(config), "loop.num_steps=100000", "run.name=long"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with (
        output.open("w") as file,
        subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
        ) as run,
    ):
        try:
            while not (folder / "status.json").exists() or read_status(folder).step < 2:
                assert run.poll() is None, output.read_text()
                time.sleep(0.1)
            children = psutil.Process(run.pid).children(recursive=True)
            assert main(["status", str(folder)]) == 0
            printed = capsys.readouterr().out
            assert f"runs as process {run.pid}" in printed and "of 100000" in printed and "reward/mean" in printed
            assert all(f"  {name}  " in printed for name in ("controller", "rank_0", "reward"))
            assert main(["stop", str(folder)]) == 0
            assert "interrupted after" in capsys.readouterr().out
            assert run.wait() == 143 and "ended by SIGTERM" in output.read_text()
        finally:
            run.kill()
    steps = [step for step, _ in states(folder / "checkpoints")]
    assert steps == [read_status(folder).step] and steps[0] >= 2, output.read_text()
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert main(["stop", str(folder)]) == 1
    assert "the run is not running" in capsys.readouterr().err
