"""`meshrl launch slurm`: the batch file has the given options, a shell can read it, and it runs."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest
from tiny_run import steps_of, write_run
from torchrun_runs import WAITING_LOSS, enter_update

from meshrl.cli import main
from meshrl.monitor.sinks import JsonlSink
from meshrl.monitor.status import read_status
from meshrl.train.checkpoint_files import states

PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


SERVER = "cluster.num_train_ranks=4 rollout.engine=vllm rollout.vllm.python=python3 rollout.mesh.infer_tp"


@pytest.mark.parametrize("gpus, more", [("8", ""), ("4", ""), ("8", "cluster.num_rollout_ranks=4")])
def test_replicas_that_fill_nodes_are_accepted(config: Path, gpus: str, more: str):
    done = _launch(config, "--nodes", "2", "--gpus-per-node", gpus, *f"{SERVER}=4 {more}".split())
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("it's a run"))


def _launch(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    out, errors = io.StringIO(), io.StringIO()
    with chdir(config.parent), redirect_stdout(out), redirect_stderr(errors):
        code = main(["launch", "slurm", str(config), *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def _directives(text: str) -> dict[str, str]:
    lines = [line[len("#SBATCH --") :] for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _comments(text: str) -> str:
    return " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


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
        "exclusive": "",
        "mem": "0",
        "time": "1:00:00",
        "partition": "big",
        "account": "us",
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": "TERM@300",
    }
    comments = _comments(done.stdout)
    assert "This is a default" in comments and "set run.name and run.resume=auto" in comments
    assert 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash' in done.stdout
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=290\n" in done.stdout
    assert "--nproc-per-node=4 " in done.stdout and done.stdout.endswith("cluster.num_train_ranks=6\n")
    file = tmp_path / "job.sbatch"
    file.write_text(done.stdout)
    if shutil.which("bash") is None:
        pytest.skip("no bash to read the file")
    subprocess.run(["bash", "-n", str(file)], check=True)


def test_the_batch_file_names_a_server_that_is_not_installed_here(config: Path):
    done = _launch(config, "rollout.engine=vllm", "rollout.vllm.python=/nowhere/python")
    assert done.returncode == 0, done.stderr
    assert "The nodes need what this machine lacks: rollout.vllm.python: no such program." in _comments(done.stdout)


def test_the_lead_of_the_signal_is_taken_from_the_longest_step_and_save_of_a_run(config: Path, tmp_path: Path):
    """The steps take 20, 100 (two phases overlap: their sum is 160), and an evaluation 60; saves 4 + 16."""
    times = iter([1000.0, 1100.0, 1160.0, 1400.0, 1500.0])
    sink = JsonlSink(tmp_path / "metrics.jsonl", clock=lambda: next(times))
    for step, values in (
        (0, {"time/rollout_s": 15.0, "time/train_s": 5.0, "sync/latency_s": 900.0}),
        (1, {"time/rollout_s": 95.0, "time/train_s": 65.0}),
        (1, {"time/eval_s": 60.0}),
        (2, {"time/train_s": 20.0, "time/save_s": 4.0, "checkpoint/write_s": 9.0}),  # after a pause of the run
        (3, {"time/train_s": 20.0, "checkpoint/write_s": 16.0}),
    ):
        sink.write(step, values, dict.fromkeys(values, "s"))
    sink.close()
    overrides = ("run.name=fixed", "run.resume=auto")
    done = _launch(config, "--from", str(tmp_path), "--time", "4:01", *overrides)
    assert done.returncode == 0, done.stderr
    assert _directives(done.stdout)["signal"] == f"TERM@{int(1.5 * (100 + 2 * 20) + 30)}"
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=230\n" in done.stdout
    comments = _comments(done.stdout)
    assert "evaluation took 100.0 s, and the longest save 20.0 s: 1.5 x (step + 2 saves) + 30 s." in comments
    assert "the run continues from its newest" in comments


def test_without_gpus_the_config_sets_the_number_of_ranks_and_each_gets_a_core(config: Path, tmp_path: Path):
    file = tmp_path / "job.sbatch"
    done = _launch(config, "--gpus-per-node", "0", "--out", str(file), "cluster.num_train_ranks=3")
    assert done.returncode == 0 and f"sbatch {file}" in done.stdout
    found = _directives(file.read_text())
    assert found["mincpus"] == "3" and not {"gpus-per-node", "time", "partition", "account"} & found.keys()
    assert "--nproc-per-node=3 " in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--nodes 2 cluster.num_train_ranks=3", "3 ranks .* can't be spread evenly over --nodes 2"),
        ("--gpus-per-node 1 cluster.num_rollout_ranks=1", "leaves no GPU to train"),
        (
            f"--nodes 2 --gpus-per-node 6 {SERVER}=4",
            "a replica of .*infer_tp = 4 ranks .* 6 ranks each: use",
        ),
        (f"--nodes 2 --gpus-per-node 6 {SERVER}=2 cluster.num_rollout_ranks=3", "can't be split into replicas"),
        (f"--nodes 4 --gpus-per-node 3 {SERVER}=2 cluster.num_rollout_ranks=4", "infer_tp = 2 ranks .* 3 ranks each"),
        ("--nodes 0", "--nodes 0: give 1 or more"),
        ("--gpus-per-node -1", "--gpus-per-node -1: give 0 or more"),
        ("--time 5", "--time 5 is 300 s, but the run gets SIGTERM 300 s before the time limit"),
        ("--time 0-00:04:59", "--time 0-00:04:59 is 299 s"),
        ("--time 1:2:3:4", "--time 1:2:3:4: give minutes, MM:SS, .* or DAYS-HH:MM:SS"),
        ("--time soon", "--time soon: give minutes"),
        ("--from nowhere", "--from nowhere: it has no metrics.jsonl; give the folder of a run"),
        ("--gpus-per-node 2 cluster.executor=inline", "num_train_ranks must be 1"),
        ("train.optimizer.lrr=1", "Nearest: train.optimizer.lr"),
    ],
)
def test_no_batch_file_is_written_for_a_config_that_can_not_run(config: Path, arguments: str, complaint: str):
    done = _launch(config, *arguments.split())
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(complaint, " ".join(done.stderr.split())), done.stderr


@pytest.mark.parametrize("limit", ["301:00", "5:01:00", "1-0", "0-0:6", "unlimited", "0"])
def test_a_time_limit_after_the_signal_is_passed_to_slurm(config: Path, limit: str):
    assert _directives(_launch(config, "--time", limit).stdout)["time"] == limit


def test_a_run_without_a_completed_checkpoint_has_no_time_to_save(config: Path, tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(0, {"time/train_s": 5.0}, {"time/train_s": "s"})
    sink.close()
    done = _launch(config, "--from", str(tmp_path))
    assert done.returncode == 2 and "set loop.save_every_steps" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_batch_file_runs_ends_with_a_checkpoint_at_slurms_signal_and_continues(config: Path, tmp_path: Path):
    """Shell scripts replace Slurm's two commands: one prints a host, the other starts each task with its number. Slurm
    signals the tasks. Without the variable that the batch file sets, torchrun would kill the ranks after a second."""
    folder, wait = config.parent / "runs" / "slurm", config.parent / "wait"
    overrides = ("cluster.num_train_ranks=2", "run.name=slurm", "run.resume=auto", "loop.num_steps=100000")
    done = _launch(config, "--nodes", "2", "--gpus-per-node", "0", *overrides, *WAITING_LOSS)
    assert done.returncode == 0, done.stderr
    scripts = {
        "scontrol": "echo 127.0.0.1",
        "srun": """
            while [[ $1 == --* ]]; do shift; done
            for i in 0 1; do SLURM_NODEID=$i "$@" & echo $! >> tasks; done
            wait -n; first=$?; wait -n && exit $first""",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": PYTHONPATH,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "one",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_ON_NODE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",
    }

    def submit(text: str) -> subprocess.Popen[str]:
        (tmp_path / "job.sbatch").write_text(text)
        with (tmp_path / "job.log").open("w") as log:
            return subprocess.Popen(
                ["bash", str(tmp_path / "job.sbatch")], stdout=log, stderr=log, env={**os.environ, **environment}
            )

    def check() -> None:
        assert job.poll() is None, (tmp_path / "job.log").read_text()

    job = submit(done.stdout)
    enter_update(folder, wait, check)
    tasks = [psutil.Process(int(line)) for line in (config.parent / "tasks").read_text().split()]
    for task in tasks:
        task.terminate()
    time.sleep(3)  # longer than the environment's time limit
    check()
    wait.unlink()
    assert job.wait() != 0
    psutil.wait_procs(tasks)
    assert "meshrl: ended by SIGTERM" in (tmp_path / "job.log").read_text()
    ((step, _),) = states(folder / "checkpoints")
    assert step == read_status(folder).step >= 2

    job = submit(done.stdout.replace("loop.num_steps=100000", f"loop.num_steps={step + 1}"))
    assert job.wait() == 0, (tmp_path / "job.log").read_text()
    assert len(steps_of(folder)) == step + 1
