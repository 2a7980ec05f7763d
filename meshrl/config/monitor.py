"""The keys of monitor.* and their checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from meshrl.config.base import OF_SAMPLING, Slice
from meshrl.config.case import Case, Problem, name_problems

TRACKERS = {"tensorboard": "", "wandb": "", "mlflow": "", "swanlab": "", "trackio": "", "prometheus": "_client"}
"""monitor.sinks -> what follows the name in that of its module."""


class MonitorConfig(Slice):
    sinks: list[str] = Field([])
    """further places for metrics: tensorboard, wandb, mlflow, swanlab, trackio, prometheus, or your own as
    package.module:function (docs/metrics.md); the terminal, metrics.jsonl and report.html always get them"""
    wandb_project: str | None = None
    """project of the wandb sink; null = WANDB_PROJECT, else meshrl. Its other WANDB_* variables apply, too"""
    prometheus_port: int = Field(9464, ge=1, le=65535)
    """of http://127.0.0.1:PORT/metrics, where the prometheus sink serves the newest values"""
    rollout_log_every_steps: Annotated[int, OF_SAMPLING] = Field(1, ge=0)
    """steps between files in rollouts/, which contain all trajectories of a step; 1 = each step has one; N = steps
    1, N + 1, 2 N + 1, ... Evaluations always have one, except with 0 = no files"""
    trace_steps: int = Field(0, ge=0)
    """steps that torch.profiler records in every rank, after two others, for traces/ in the run's folder; 0 = none:
    traces/ then has only the spans of the newest steps. The profiler makes steps slower, and its files are large"""


def sink_problems(case: Case) -> Iterator[Problem]:
    for name in case.config.monitor.sinks:
        yield from name_problems("monitor.sinks", name, TRACKERS)
    if case.purpose != "eval" and case.starts:  # an evaluation does not use them
        yield from missing_clients(case.config.monitor)


def missing_clients(cfg: MonitorConfig) -> Iterator[Problem]:
    """Trackers whose client is not installed."""
    for name in cfg.sinks:
        if name in TRACKERS and importlib.util.find_spec(module := name + TRACKERS[name]) is None:
            package = module.replace("_", "-")
            yield Problem(("monitor.sinks",), f"{name} is not installed: pip install {package}, or leave it out here.")
