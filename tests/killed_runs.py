"""Runs that are killed at random moments and resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshrl.run import start
from meshrl.tools.report.page import write_report
from meshrl.train.checkpoint_files import states


def run_and_kill(config: str, overrides: list[str], kills: int, seed: int, longest_s: float) -> None:
    """Runs in a process that has imported everything. Forks children that run until they are killed at random moments;
    the last child runs to its end. Prints the list of checkpoints after each kill."""
    from meshrl.config.load import load_run_config

    loaded = load_run_config(config, overrides)
    folder = Path(loaded.config.run.folder) / loaded.config.run.name
    moments, num_steps = random.Random(seed), loaded.config.loop.num_steps
    if loaded.config.cluster.executor == "inline":
        os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})
    for number in range(kills + 1):
        child = os.fork()
        if child == 0:
            start.train(loaded, write_report)
            os._exit(0)
        if number < kills:
            before = len(list((folder / "rollouts").glob("step_*.jsonl")))
            end = time.monotonic() + 60
            while number and len(list((folder / "rollouts").glob("step_*.jsonl"))) <= before < num_steps - 1:
                if time.monotonic() > end:
                    break
                time.sleep(0.01)
            time.sleep(moments.random() * longest_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if number < kills:
            print(json.dumps([step for step, _ in states(folder / "checkpoints")]), file=sys.__stdout__, flush=True)
    sys.exit(os.waitstatus_to_exitcode(status))


def killed(config: Path, name: str, kills: int, seed: int, longest_s: float, *overrides: str) -> list[list[int]]:
    """Kill a run several times, and then let it run to its end. Returns the checkpoints after each kill."""
    options = [*overrides, f"run.name={name}", "run.resume=auto", "loop.save_every_steps=1", "run.keep_checkpoints=2"]
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\nimport meshrl.run.start, transformers\n"
        "from killed_runs import run_and_kill\n"
        f"run_and_kill({str(config)!r}, {options!r}, {kills}, {seed}, {longest_s})"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
