"""`meshrl train` under torchrun, on one machine or on several simulated ones, and its processes that still run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from meshrl.monitor.status import read_status

PYTHONPATH = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
MARK = "MESHRL_TEST_RUN"


def start_torchrun(
    config: Path, name: str, *overrides: str, nodes: int, ranks: int, max_restarts: int = 0, **variables: str
) -> list[subprocess.Popen[str]]:
    """One torchrun for each node, with its share of the ranks and of this machine's cores."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    where = ["--standalone"] if nodes == 1 else [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-id={name}"]
    where += [f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"] if nodes > 1 else []
    where += [f"--max-restarts={max_restarts}"]
    cores = sorted(os.sched_getaffinity(0))
    run = ["-m", "meshrl", "train", str(config), f"run.name={name}", *overrides]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={ranks // nodes}", *run],
            cwd=config.parent,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, MARK: name, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda node=node: os.sched_setaffinity(0, cores[node::nodes] or cores),
        )
        for node in range(nodes)
    ]


def train_by_torchrun(config: Path, name: str, *overrides: str, nodes: int, ranks: int) -> Path:
    """Run to the end. Returns the run's folder."""
    started = start_torchrun(config, name, *overrides, nodes=nodes, ranks=ranks)
    texts = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * nodes, "\n".join(texts)[-6000:]
    return config.parent / "runs" / name


WAITING_LOSS = ("algo.loss.kind=own_algorithms:waits_for", "algo.loss.file=wait")


def enter_update(run: Path, wait: Path, check: Callable[[], None]) -> None:
    """Wait until a run with the loss WAITING_LOSS has finished two steps, and is in the middle of an update, which it
    does not leave while the file `wait` exists. check: raises when the run has ended."""
    while not (run / "status.json").exists() or read_status(run).step < 2:
        check()
        time.sleep(0.1)
    wait.touch()
    while not wait.with_name(f"{wait.name}.waits").exists():
        check()
        time.sleep(0.02)


def processes_of_run(name: str) -> Sequence[psutil.Process]:
    """Living processes of a run of this name: those that torchrun started, and rank workers below this process."""
    found, below = [], set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        try:
            is_rank = process in below and "meshrl.cluster.worker" in " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and (is_rank or process.environ().get(MARK) == name):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
