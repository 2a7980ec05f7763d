from __future__ import annotations

from typing import Literal

from meshrl.config.base import Slice, field


class MonitorConfig(Slice):
    sinks: list[Literal["tensorboard", "wandb"]] = field(
        [], "where a run's numbers go besides the terminal, metrics.jsonl and report.html, which are always written"
    )
    wandb_project: str | None = field(
        None, "project of the wandb sink; null = WANDB_PROJECT, else meshrl. Its other WANDB_* variables hold, too"
    )
