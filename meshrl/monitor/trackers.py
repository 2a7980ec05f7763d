"""TensorBoard and Weights & Biases as sinks; each is imported only when a run uses it.

Both count finished steps from 1, so an evaluation before the first step is at 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshrl.config.monitor import MonitorConfig
from meshrl.core.errors import ConfigError
from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.sinks import Sink


def open_trackers(
    cfg: MonitorConfig, folder: Path, resolved: dict[str, Any], note: Callable[[str], None]
) -> list[Sink]:
    """The configured sinks in addition to metrics.jsonl and the terminal.

    folder: the run's folder; its name is the run's name in W&B. resolved: the complete config as plain values, for W&B.
    note: called with a line that contains the address of the curves.

    Raises: ConfigError when W&B can't be reached or the user is not logged in.
    """
    opened: list[Sink] = []
    for name in dict.fromkeys(cfg.sinks):
        if name == "tensorboard":
            opened.append(TensorBoardSink(folder / "tensorboard"))
            note(f"TensorBoard: tensorboard --logdir {folder / 'tensorboard'}")
        else:
            wandb = WandbSink(folder, cfg.wandb_project, resolved)
            opened.append(wandb)
            note(f"W&B: {wandb.where}")
    return opened


class TensorBoardSink:
    """Event files in `folder`; the description of each curve is the glossary's text. Flushed after every step."""

    def __init__(self, folder: Path):
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step + 1, description=_describe(name, units.get(name, "")))
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        self._writer.close()


def _describe(name: str, unit: str) -> str:
    found = meaning_of(name)
    texts = [f"Unit: {unit}."] * bool(unit)
    if found is not None:
        healthy, otherwise = found.entry.healthy, found.entry.otherwise
        texts += [f"Healthy: {healthy}."] + [f"Otherwise: {otherwise}."] * bool(otherwise)
    return "\n\n".join(texts)


class WandbSink:
    """One W&B run, with its files in `folder`/wandb. WANDB_MODE=offline keeps it on this machine until `wandb sync`.

    where: the run's page; offline, the command that uploads the run.
    """

    def __init__(self, folder: Path, project: str | None, resolved: dict[str, Any]):
        import wandb

        settings = wandb.Settings(console="off", silent=True)  # its lines would break the live display
        try:
            self._run = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT", "meshrl"),
                name=folder.name,
                dir=str(folder),
                config=resolved,
                settings=settings,
            )
        except wandb.errors.Error as e:
            raise ConfigError(
                f"monitor.sinks has wandb, which reports: {e}\nRun `wandb login` (or set WANDB_API_KEY), set "
                "WANDB_MODE=offline to keep the run on this machine, or remove wandb from monitor.sinks"
            ) from e
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        upload = f"offline; upload it with: wandb sync {Path(self._run.dir).parent}"
        self.where = upload if self._run.offline else self._run.url or "disabled by WANDB_MODE"

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        self._run.log({"step": step + 1, **values})

    def close(self, failed: bool = False) -> None:
        """End the W&B run; failed: mark it as failed."""
        self._run.finish(exit_code=int(failed))
