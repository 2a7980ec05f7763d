"""Complete training runs in separate processes: the task, which is the same for both trainers, and the measurements.

The trainers report the end of each step themselves (wall-clock seconds, reward, sampled tokens). A thread of this
process reads the memory of the process tree and the CPU time of its first process, twice a second: the resident size
each time, the proportional one only when the resident one has grown by 1 %, because the kernel walks all pages for it:
of 8 GB, twice a second, that took almost a fifth of the time of one core.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rewards import GSM8K, STAND_IN

from meshrl.config.data import DataConfig
from meshrl.data.chat import load_tokenizer
from meshrl.data.datasets import PromptMaker, load_prompts
from meshrl.monitor.sinks import read_metrics

HERE = Path(__file__).resolve().parent
SAMPLE_EVERY_S = 0.5
LARGER = 1.01  # the proportional size is read when the resident size exceeds that of the last reading by this factor
SCORES_ALL = (
    "from meshrl.loops import sync_and_probe as p; p.SCORED_ONE_IN = 1; from meshrl.cli import main; exit(main())"
)
OPTIMIZER: dict[str, Any] = dict(lr=3e-5, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.0, clip=1.0)


def objective(model: Path | None, even_start: bool = False) -> dict[str, Any]:
    """Rewards and optimizer of a TrainingTask: those of GSM8K; without a model, or with even_start, those of the
    stand-in.

    The stand-in's learning rate is so small that its policy, and so the length of its answers, does not change. At 3e-5
    the first step changed the mean length from 90 tokens to 135 with this reward, and to 9 with one for short answers
    (results/first_step_20261124-144730.json).
    """
    if model is not None and not even_start:
        return {"rewards": GSM8K, "optimizer": OPTIMIZER}
    return {"rewards": STAND_IN, "optimizer": {**OPTIMIZER, "lr": 1e-9}}


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """The task of a training run, for both trainers. Rows of `data` are taken in order, prompts_per_step a step."""

    model: str
    data: str
    rewards: dict[str, dict[str, Any]]
    dtype: str = "bfloat16"
    num_steps: int = 5
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    max_prompt_tokens: int = 256  # longer prompts are removed beforehand, for both trainers
    max_new_tokens: int = 256
    threads: int = 2
    seed: int = 0
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(OPTIMIZER))
    advantage_eps: float = 1e-4  # TRL adds this to a group's standard deviation


@dataclass(frozen=True, kw_only=True)
class Step:
    """One finished step: its time (seconds since 1970), mean reward, sampled tokens, and all its other metrics."""

    time: float
    reward: float
    tokens: float
    metrics: dict[str, float]


@dataclass(kw_only=True)
class TrainingRun:
    """The measurements of a run. peak_pss_bytes: of the process tree, each shared page counts once; peak_rss_bytes
    counts a shared page in each process. cpu: (seconds since 1970, CPU seconds of the first process)."""

    steps: list[Step]
    wall_s: float
    peak_pss_bytes: int
    peak_rss_bytes: int
    cpu: list[tuple[float, float]]

    def seconds_after_first(self) -> float:
        """Seconds from the end of the first step, a warm-up, to the end of the last."""
        return self.steps[-1].time - self.steps[0].time

    def cpu_s_after_first(self) -> float:
        """CPU seconds of the first process in that time."""
        times, seconds = zip(*self.cpu, strict=True)
        first, last = np.interp([self.steps[0].time, self.steps[-1].time], times, seconds)
        return float(last - first)

    def tokens_per_s(self) -> float:
        return sum(s.tokens for s in self.steps[1:]) / self.seconds_after_first()

    def samples_per_s(self, samples_per_step: int) -> float:
        return (len(self.steps) - 1) * samples_per_step / self.seconds_after_first()


def rows_for(model: Path, data: Path, num_rows: int, path: Path, max_prompt_tokens: int = 256) -> Path:
    """Write a file of exactly num_rows rows with short enough prompts; if there are fewer, rows are repeated."""
    cfg = DataConfig(path=str(data), max_prompt_tokens=max_prompt_tokens)
    prompts, _ = load_prompts(data, PromptMaker(cfg, load_tokenizer(model)))
    rows = [{"question": p.messages[-1]["content"], "answer": p.answer} for p in prompts]
    path.write_text("".join(json.dumps(rows[i % len(rows)]) + "\n" for i in range(num_rows)), encoding="utf-8")
    return path


def run_meshrl(task: TrainingTask, folder: Path, num_ranks: int = 2, scores_all: bool = False) -> TrainingRun:
    """Run `meshrl train` with num_ranks processes that train and sample. scores_all: also the rows without a gradient
    that a run leaves out."""
    config = {
        "model": {"path": task.model, "dtype": task.dtype},
        "data": {"path": task.data, "shuffle": False, "max_prompt_tokens": task.max_prompt_tokens},
        "reward": {"terms": task.rewards},
        "rollout": {"sampling": {"max_new_tokens": task.max_new_tokens}},
        "algo": {"advantage_eps": task.advantage_eps},
        "train": {"activation_checkpointing": False, "optimizer": task.optimizer},
        "loop": {
            "num_steps": task.num_steps,
            "prompts_per_step": task.prompts_per_step,
            "samples_per_prompt": task.samples_per_prompt,
        },
        "cluster": {"executor": "processes", "num_train_ranks": num_ranks},
        "run": {"name": "run", "folder": str(folder), "seed": task.seed},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    command = ["-c", SCORES_ALL] if scores_all else ["-m", "meshrl"]
    found = _run([sys.executable, *command, "train", str(path)], folder, task.threads)
    lines, _ = read_metrics(folder / "run" / "metrics.jsonl")
    found.steps = [
        Step(
            time=line.time,
            reward=line.metrics.get("reward/mean", float("nan")),
            tokens=line.metrics["rollout/num_tokens"],
            metrics={n: v for n, v in line.metrics.items() if n.startswith(("time/", "train/no_"))},
        )
        for line in lines
        if "rollout/num_tokens" in line.metrics
    ]
    return found


def run_trl(task: TrainingTask, folder: Path, python: Path, settings: dict[str, Any]) -> TrainingRun:
    """Run TRL's GRPOTrainer (trl_grpo.py) with the Python of TRL's environment; settings: see trl_grpo.py."""
    folder.mkdir(parents=True, exist_ok=True)
    path, steps = folder / "task.json", folder / "steps.jsonl"
    path.write_text(json.dumps({"task": vars(task), "settings": settings, "steps": str(steps)}), encoding="utf-8")
    ranks = settings["num_ranks"]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    found = _run([str(python), *launch, str(HERE / "trl_grpo.py"), str(path)], folder, max(1, task.threads // ranks))
    for line in steps.read_text(encoding="utf-8").splitlines():
        found.steps.append(Step(**json.loads(line)))
    return found


def _run(command: list[str], folder: Path, threads: int) -> TrainingRun:
    """Run a command to its end. Raises: SystemExit with the end of its output when it fails."""
    log = folder / "log.txt"
    paths = [str(HERE), str(HERE.parent)]  # for rewards.py, and for meshrl in an environment without it
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
    began = time.monotonic()
    with log.open("wb") as out:
        process = psutil.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, cwd=folder)
        run = TrainingRun(steps=[], wall_s=0.0, peak_pss_bytes=0, peak_rss_bytes=0, cpu=[(time.time(), 0.0)])
        sampler = threading.Thread(target=_sample, args=(process, run), daemon=True)
        sampler.start()
        try:
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)  # both trainers then end their child processes
            raise
        sampler.join()
    run.wall_s = time.monotonic() - began
    if code != 0:
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(f"{' '.join(command)} ended with exit code {code}:\n{tail}")
    return run


def _sample(process: psutil.Process, run: TrainingRun) -> None:
    rss_at_reading = 0
    while True:
        try:
            cpu = process.cpu_times()
            tree = [process, *process.children(recursive=True)]
        except psutil.Error:
            return
        run.cpu.append((time.time(), cpu.user + cpu.system))
        rss = _sum(tree, lambda p: p.memory_info().rss)
        if rss > LARGER * rss_at_reading:
            rss_at_reading = rss
            run.peak_pss_bytes = max(run.peak_pss_bytes, _sum(tree, _pss))
        run.peak_rss_bytes = max(run.peak_rss_bytes, rss)
        time.sleep(SAMPLE_EVERY_S)


def _sum(tree: Iterable[psutil.Process], size: Callable[[psutil.Process], int]) -> int:
    """Of the processes that have not just ended."""
    total = 0
    for process in tree:
        with suppress(psutil.Error, OSError):
            total += size(process)
    return total


def _pss(process: psutil.Process) -> int:
    """Proportional set size, or the resident size if the kernel does not report it."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
    if not rollup.exists():
        return process.memory_info().rss
    return next(int(line.split()[1]) << 10 for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
