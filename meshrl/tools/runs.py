"""`meshrl runs`: the runs in a folder, and what is known about each without reading its rollouts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.core.errors import MeshrlError
from meshrl.core.files import is_there
from meshrl.monitor.jsonl import data_errors, read_lines, read_object
from meshrl.monitor.sinks import duration
from meshrl.monitor.status import STATUS_FILE, Status, read_status
from meshrl.run.folder import similar_runs
from meshrl.run.lease import is_running
from meshrl.tools.report.folder import read_settings

_METRICS = "metrics.jsonl"
_HELD_OUT = "eval/mean_at_k"
_TRAINED = ("reward/mean", "loss/nll")  # the first that a run has


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run. state: running, done, failed, interrupted, killed, or unknown when the run is another user's. counted:
    what step and num_steps count: step, or answer of an evaluation. started: seconds since 1970. held_out: (finished
    steps, score) of each evaluation. trained: name and last value of a metric, None before the first step."""

    folder: Path
    state: str
    counted: str
    step: int
    num_steps: int | None
    started: float
    seconds: float
    model: str
    held_out: list[tuple[int, float]]
    trained: tuple[str, float] | None

    @property
    def progress(self) -> str:
        return f"{self.step}{f' of {self.num_steps}' if self.num_steps else ''} {self.counted}s"

    @property
    def best(self) -> tuple[int, float]:
        """The first of the highest scores."""
        return max(self.held_out, key=lambda one: -math.inf if math.isnan(one[1]) else one[1])

    def __str__(self) -> str:
        """Such as `done, 20 of 20 steps, held-out 0.225 -> 0.31`."""
        parts = [self.state, self.progress]
        if self.held_out:
            scores = dict.fromkeys(f"{score:.4g}" for _, score in (self.held_out[0], self.held_out[-1]))
            parts.append(f"held-out {' -> '.join(scores)}")
        elif self.trained:
            parts.append(f"{self.trained[0]} {self.trained[1]:.4g}")
        return ", ".join(parts)


def is_run(folder: Path) -> bool:
    return is_there(folder / _METRICS) or is_there(folder / STATUS_FILE)


def require_run(folder: Path) -> None:
    """Raises: MeshrlError when it is not a run's folder; it names the most similar runs."""
    if not is_run(folder):
        raise MeshrlError(f"{folder} is not a run's folder: it has no {_METRICS}{similar_runs(folder)}")


def read_facts(folder: Path) -> RunFacts:
    """Raises: MeshrlError when it is not a run's folder, or when a file is damaged."""
    require_run(folder)
    status = read_status(folder) if is_there(folder / STATUS_FILE) else None
    result = read_object(folder / "result.json") if is_there(folder / "result.json") else {}
    settings = read_settings(folder / "config.yaml")
    held_out = _held_out(folder / _METRICS)
    state = state_of(folder, status)
    with data_errors(str(folder / "result.json"), "the result of a run"):
        seconds = float(result["wall_s"]) if result.get("wall_s") and state != "killed" else 0.0
    changed = max((p.stat().st_mtime for n in (_METRICS, STATUS_FILE) if (p := folder / n).exists()), default=0.0)
    started = status.started if status else changed
    values = status.values if status else {}
    model = next((s.value.strip('"') for s in settings if s.key == "model.path"), "")
    is_eval = any(s.origin == "meshrl eval" for s in settings)
    return RunFacts(
        folder=folder,
        state=state,
        counted="answer" if is_eval else "step",
        step=status.step if status else max((step for step, _ in held_out), default=0),
        num_steps=status.num_steps if status else None,
        started=started,
        seconds=seconds or (time.time() if state == "running" else changed) - started,
        model="/".join(Path(model).parts[-2:]),  # enough to recognize it
        held_out=held_out,
        trained=None if is_eval else next(((n, v) for n in _TRAINED if (v := values.get(n)) is not None), None),
    )


def state_of(folder: Path, status: Status | None) -> str:
    """The state of a run in one word, as in RunFacts. An older result.json is of an earlier part of the run."""
    try:
        if status is not None and is_running(folder, status):
            return "running"
    except MeshrlError:
        return "unknown"
    path = folder / "result.json"
    if not path.is_file() or (status is not None and path.stat().st_mtime < status.started):
        return "killed"
    return str(read_object(path).get("status"))


def _held_out(path: Path) -> list[tuple[int, float]]:
    """The score of each evaluation in a metrics.jsonl."""
    if not path.exists():
        return []
    found = []
    for line in read_lines(path, containing=f'"{_HELD_OUT}"'.encode()):
        with data_errors(str(path), "a line of metrics.jsonl"):
            if _HELD_OUT in line.get("metrics", {}):
                found.append((int(line["step"]), float(line["metrics"][_HELD_OUT])))
    return found


def list_runs(folder: Path) -> str:
    """The output of `meshrl runs`: a line for each run, the oldest first. Evaluations that `meshrl eval` wrote into the
    folder of their run belong to that run, and have no line.

    Raises: MeshrlError when the folder has no runs.
    """
    rows, damaged, others = list[RunFacts](), list[str](), 0
    for inside in sorted(path for path in folder.glob("*") if path.is_dir()):
        if not is_run(inside):
            others += 1
            continue
        try:
            rows.append(read_facts(inside))
        except MeshrlError as error:
            damaged.append(f"{inside.name}: can't be read: {error}")
    if not rows and not damaged:
        raise MeshrlError(f"{folder} has no runs; give a folder such as runs, in which `meshrl train` writes")
    head = ("run", "state", "progress", "started", "took", "model", "held-out", "best", "last", "training")
    lines = list(table([head, *map(_cells, sorted(rows, key=lambda row: row.started))])) if rows else []
    skipped = [f"folders that are no runs: {others}"] if others else []
    return "\n".join([*lines, *damaged, *skipped])


def _cells(run: RunFacts) -> tuple[str, ...]:
    scores = ["", "", ""]
    if run.held_out:
        scores = [f"{score:.3f}" for score in (run.held_out[0][1], run.best[1], run.held_out[-1][1])]
    trained = f"{run.trained[1]:.3f}{' nll' * (run.trained[0] == 'loss/nll')}" if run.trained else ""
    started = time.strftime("%F %H:%M", time.localtime(run.started))
    return run.folder.name, run.state, run.progress, started, duration(run.seconds), run.model, *scores, trained


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of equal length as lines with aligned columns; those that begin with a digit are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = [all(cell[:1] in "+-0123456789" for cell in column[1:]) for column in zip(*rows)]
    for row in rows:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right))
        yield "  ".join(cells).rstrip()
