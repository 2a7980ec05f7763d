"""The Python API: `meshrl.train`, `meshrl.sft` and `meshrl.evaluate`, for scripts and notebooks.

Only the standard library is imported here: every process of a run imports this file with the package.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pandas import DataFrame

    from meshrl.agent.loop import Agent
    from meshrl.agent.resolve import AgentFunction
    from meshrl.config.load import Source
    from meshrl.core.types import Trajectory
    from meshrl.monitor.sinks import MetricsLine
    from meshrl.run.inputs import OnStep, Rewards


def train(
    config: Source,
    overrides: Sequence[str] = (),
    *,
    rewards: Rewards | None = None,
    agent: Agent | AgentFunction | None = None,
    data: Iterable[dict[str, Any]] | None = None,
    eval_data: Iterable[dict[str, Any]] | None = None,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> Run:
    """Reinforcement learning, like `meshrl train`: the same checks, folder, report and resume.

    config: the path of a YAML file, a dict of its sections, or a RunConfig; `base` in a dict is the path of a file to
    start from.
    overrides: as on the command line, such as "train.optimizer.lr=1e-6".
    rewards: a function of (completion, answer), a list of them, or a dict by the name of their term, which else is that
    of the function. They run in worker processes, so their changes to variables are not visible here. The weight and
    the args of a term belong in the config.
    agent: an object with the method `run` and the list `tools`, or an async function in place of that method.
    data, eval_data: rows in place of data.path and data.eval_path.
    on_step: called as on_step(step, metrics) after each step. If it returns False, the run ends after this step, with
    an evaluation, a model and a checkpoint as after the last step.
    quiet: print nothing.

    Raises: ConfigError and the other errors of meshrl.core.errors; KeyboardInterrupt after Ctrl-C, with a checkpoint
    saved; exceptions of on_step. SystemExit after SIGTERM or SIGHUP, and under torchrun at the end in all processes
    except rank 0's.
    """
    from meshrl.run.inputs import begin, load_run, objects_of

    rows = {"data.path": data, "data.eval_path": eval_data}
    objects = objects_of(rewards, agent, rows, on_step, quiet)
    loaded = load_run(config, overrides, "train", objects)
    begin(loaded, quiet)
    from meshrl.run import start
    from meshrl.tools.report.page import write_report

    return Run(start.train(loaded, write_report, objects))


def sft(
    config: Source,
    overrides: Sequence[str] = (),
    *,
    data: Iterable[dict[str, Any]] | None = None,
    eval_data: Iterable[dict[str, Any]] | None = None,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> Run:
    """Supervised fine-tuning, like `meshrl sft`. The other arguments are as in `train`.

    data, eval_data: rows in place of sft.path and sft.eval_path.
    """
    from meshrl.run.inputs import begin, load_sft, objects_of

    objects = objects_of(rows={"sft.path": data, "sft.eval_path": eval_data}, on_step=on_step, quiet=quiet)
    loaded = load_sft(config, overrides, objects)
    begin(loaded, quiet)
    from meshrl.run import start
    from meshrl.tools.report.page import write_report

    return Run(start.sft(loaded, write_report, objects))


def evaluate(
    config: Source,
    overrides: Sequence[str] = (),
    *,
    model: str | Path | None = None,
    out: str | Path | None = None,
    rewards: Rewards | None = None,
    agent: Agent | AgentFunction | None = None,
    eval_data: Iterable[dict[str, Any]] | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Answer and score held-out rows, like `meshrl eval`, in a new folder.

    config: as in `train`, or the folder of a run, whose config.yaml and model are then used.
    model: in place of model.path: the folder of a model, of a run, or of a step of a run.
    out: the folder to write; it must not exist. None = eval_N in the folder of the model's run, or below run.folder.

    The other arguments are as in `train`.
    """
    from meshrl.run.inputs import begin, load_run, objects_of
    from meshrl.run.subject import subject_of

    objects = objects_of(rewards, agent, {"data.eval_path": eval_data}, quiet=quiet)
    file, subject = subject_of(config, model)
    of_run = None if file is config else file.parent
    loaded = load_run(file, subject.overrides(overrides), "eval", objects, of_run=of_run)
    begin(loaded, quiet)
    from meshrl.run import start
    from meshrl.tools.convert import convert
    from meshrl.tools.report.page import write_report

    folder = None if out is None else Path(out)
    return Evaluation(*start.evaluate(loaded, subject, folder, write_report, convert, objects))


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` returns.

    metrics: values by name, such as eval/mean_at_k.
    trajectories: all answers, with their rewards, in the order of the rows.
    folder: the written files.
    """

    metrics: dict[str, float]
    trajectories: list[Trajectory]
    folder: Path

    def __repr__(self) -> str:
        score, count = self.metrics.get("eval/mean_at_k", float("nan")), len(self.trajectories)
        return f"Evaluation({str(self.folder)!r}: held-out {score:.4g}, {count} answers)"


class Run:
    """A run that has ended, read from its folder. `Run("runs/NAME")` opens an earlier or interrupted run.

    Raises: MeshrlError when the folder is not a run's; it names the most similar runs.
    """

    def __init__(self, folder: str | Path):
        from meshrl.tools.runs import require_run

        require_run(Path(folder))
        self.folder = Path(folder).resolve()

    def __repr__(self) -> str:
        from meshrl.core.errors import MeshrlError
        from meshrl.tools.runs import read_facts

        try:
            known = str(read_facts(self.folder))
        except MeshrlError:  # a repr must not raise
            known = "it can't be read"
        return f"Run({os.path.relpath(self.folder)!r}: {known})"

    @cached_property
    def lines(self) -> list[MetricsLine]:
        """metrics.jsonl: a line for each step (number from 1, time, metrics) and for each evaluation, with the number
        of finished steps."""
        from meshrl.monitor.sinks import read_metrics

        return read_metrics(self.folder / "metrics.jsonl")[0]

    @cached_property
    def metrics(self) -> dict[str, list[float]]:
        """All values of each metric, in order, for example metrics["reward/mean"]. Raises: KeyError for a name that the
        run does not have; it names the nearest."""
        from meshrl.monitor.metrics import NamedValues

        values: dict[str, list[float]] = NamedValues()
        for line in self.lines:
            for name, value in line.metrics.items():
                values.setdefault(name, []).append(value)
        return values

    def frame(self) -> DataFrame:
        """The metrics as a table of pandas: a row for each line of metrics.jsonl, a column for each metric, the step in
        the column `step`. Raises: ImportError without pandas."""
        import pandas

        return pandas.DataFrame([{"step": line.step, **line.metrics} for line in self.lines])

    @cached_property
    def summary(self) -> dict[str, Any]:
        """result.json: status (done, interrupted or failed), steps, curves, the best evaluation, and failed_writes by
        output, if there are any."""
        from meshrl.monitor.jsonl import read_object

        return read_object(self.folder / "result.json")

    @property
    def model(self) -> Path | None:
        """The best model if an evaluation has recorded one, else the newest, for from_pretrained: its folder, or
        model.path if no step made it better; None when the run has written no model."""
        from meshrl.core.errors import ConfigError
        from meshrl.run.subject import find_subject

        try:
            subject = find_subject(self.folder)
        except ConfigError:  # neither a model nor a state
            return None
        return None if subject.model is None or subject.state is not None else Path(subject.model)

    @property
    def best_model(self) -> Path | None:
        """The model with the highest held-out score: its folder, or model.path if no step made it better; None when the
        run has recorded none."""
        from meshrl.core.best_models import read_best

        best = read_best(self.folder)
        return None if best is None else Path(best.model)

    def trajectories(self, step: int = -1) -> list[Trajectory]:
        """The scored answers of a step, counted from 1, or from the end as -1. An SFT run has none.

        Raises: IndexError when the run has no such step.
        """
        return self._answers("step", step, "answers of step", "monitor.rollout_log_every_steps")

    def eval_trajectories(self, step: int = -1) -> list[Trajectory]:
        """The scored answers to the held-out prompts after `step` steps; 0 = before the first one, -1 = the last
        evaluation, -2 the one before it.

        Raises: IndexError when there was no evaluation after this step.
        """
        return self._answers("eval", step, "evaluation after step", "loop.eval_every_steps")

    def _answers(self, kind: str, step: int, what: str, key: str) -> list[Trajectory]:
        from meshrl.monitor.rollout_log import answer_files, read_rollouts

        paths = answer_files(self.folder, kind)
        if -len(paths) <= step < 0:
            step = sorted(paths)[step]
        if step not in paths:  # a run that started from another run's checkpoint has only its own steps
            steps = ", ".join(map(str, paths)) or "none"
            raise IndexError(f"{self.folder} has no {what} {step} ({key}); there are: {steps:.300}")
        return [logged.trajectory for logged in read_rollouts(paths[step])]
