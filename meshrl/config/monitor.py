"""The keys of monitor.* and their checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Literal

from meshrl.config.base import Slice, field
from meshrl.config.source import Problem


class MonitorConfig(Slice):
    sinks: list[Literal["tensorboard", "wandb"]] = field(
        [], "further places for metrics; the terminal, metrics.jsonl and report.html always get them"
    )
    wandb_project: str | None = field(
        None, "project of the wandb sink; null = WANDB_PROJECT, else meshrl. Its other WANDB_* variables apply, too"
    )


def sink_problems(monitor: MonitorConfig) -> Iterator[Problem]:
    for name in monitor.sinks:
        if importlib.util.find_spec(name) is None:
            yield Problem(("monitor.sinks",), f"{name} is not installed: pip install {name}, or leave it out here.")
