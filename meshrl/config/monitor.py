"""The keys of monitor.* and their checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from meshrl.config.base import OF_SAMPLING, Slice
from meshrl.config.case import Case, Problem


class MonitorConfig(Slice):
    sinks: list[Literal["tensorboard", "wandb"]] = Field([])
    """further places for metrics; the terminal, metrics.jsonl and report.html always get them"""
    wandb_project: str | None = None
    """project of the wandb sink; null = WANDB_PROJECT, else meshrl. Its other WANDB_* variables apply, too"""
    rollout_log_every_steps: Annotated[int, OF_SAMPLING] = Field(1, ge=0)
    """steps between files in rollouts/, which contain all trajectories of a step; 1 = each step has one; N = steps
    1, N + 1, 2 N + 1, ... Evaluations always have one, except with 0 = no files"""
    trace_steps: int = Field(0, ge=0)
    """steps that torch.profiler records in every rank, after two others, for traces/ in the run's folder; 0 = none:
    traces/ then has only the spans of the newest steps. The profiler makes steps slower, and its files are large"""


def sink_problems(case: Case) -> Iterator[Problem]:
    is_used = case.purpose != "eval" and case.starts  # an evaluation does not use them
    for name in case.config.monitor.sinks if is_used else ():
        if importlib.util.find_spec(name) is None:
            yield Problem(("monitor.sinks",), f"{name} is not installed: pip install {name}, or leave it out here.")
