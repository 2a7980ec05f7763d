"""`meshrl launch slurm`: the batch file has the given options, a shell can read it, and it runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import steps_of, write_run

PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("it's a run"))


def _launch(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshrl", "launch", "slurm", str(config), *arguments],
        capture_output=True,
        text=True,
        cwd=config.parent,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )


def _directives(text: str) -> dict[str, str]:
    return dict(line[len("#SBATCH --") :].split("=", 1) for line in text.splitlines() if line.startswith("#SBATCH"))


def test_the_batch_file_has_the_given_options_and_starts_a_rank_for_each_gpu(config: Path, tmp_path: Path):
    done = _launch(
        config, "--nodes", "2", "--gpus-per-node", "4", "--time", "1:00:00", "--partition", "big", "--account", "us",
        "cluster.num_rollout_ranks=2", "run.name=it's",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert _directives(done.stdout) == {
        "job-name": "config",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "time": "1:00:00",
        "partition": "big",
        "account": "us",
        "output": "%x-%j.log",
        "signal": "TERM@120",
    }
    assert "--nproc-per-node=4 " in done.stdout and done.stdout.endswith("cluster.num_train_ranks=6\n")
    file = tmp_path / "job.sbatch"
    file.write_text(done.stdout)
    if shutil.which("bash") is None:
        pytest.skip("no bash to read the file")
    subprocess.run(["bash", "-n", str(file)], check=True)


def test_without_gpus_the_config_sets_the_number_of_ranks_and_each_gets_a_core(config: Path, tmp_path: Path):
    file = tmp_path / "job.sbatch"
    done = _launch(config, "--gpus-per-node", "0", "--out", str(file), "cluster.num_train_ranks=3")
    assert done.returncode == 0 and f"sbatch {file}" in done.stdout
    found = _directives(file.read_text())
    assert found["cpus-per-task"] == "3" and not {"gpus-per-node", "time", "partition", "account"} & found.keys()
    assert "--nproc-per-node=3 " in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--nodes 2 cluster.num_train_ranks=3", "3 ranks .* can't be spread evenly over --nodes 2"),
        ("--gpus-per-node 1 cluster.num_rollout_ranks=1", "leaves no GPU to train"),
        ("--nodes 0", "--nodes 0: give 1 or more"),
        ("--gpus-per-node -1", "--gpus-per-node -1: give 0 or more"),
        ("--gpus-per-node 2 cluster.executor=inline", "num_train_ranks must be 1"),
        ("train.optimizer.lrr=1", "Nearest: train.optimizer.lr"),
    ],
)
def test_no_batch_file_is_written_for_a_config_that_can_not_run(config: Path, arguments: str, complaint: str):
    done = _launch(config, *arguments.split())
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(complaint, " ".join(done.stderr.split())), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_batch_file_runs(config: Path, tmp_path: Path):
    """Shell scripts replace Slurm's two commands: one prints a host, the other starts each task with its number."""
    done = _launch(config, "--nodes", "2", "--gpus-per-node", "0", "run.name=slurm", "cluster.num_train_ranks=2")
    assert done.returncode == 0, done.stderr
    (tmp_path / "job.sbatch").write_text(done.stdout)
    scripts = {
        "scontrol": "echo 127.0.0.1",
        "srun": 'shift; for i in 0 1; do SLURM_NODEID=$i "$@" & done; wait -n && wait -n',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    ran = subprocess.run(
        ["bash", str(tmp_path / "job.sbatch")],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": PYTHONPATH,
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "one",
            "SLURM_NNODES": "2",
        },
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(steps_of(config.parent / "runs" / "slurm")) == 2
