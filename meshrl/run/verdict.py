"""The verdict on a run: whether its held-out score has changed by more than chance explains, and its best model.

The interval of a difference is 1.96 standard errors wide on each side (95 %): the root of the sum of the squares of
`eval/standard_error` of both evaluations, as if their prompts were different ones. Equal prompts mostly make the real
interval narrower.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.core.errors import MeshrlError
from meshrl.monitor.jsonl import data_errors, read_object
from meshrl.monitor.sinks import MetricsLine, read_metrics
from meshrl.run.models import Best, read_best

Z = 1.96
"""Standard errors on each side of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """first, last: (finished steps, held-out score). margin: half of the width of the interval of their difference, or
    of the only score; NaN if the run has no standard errors. best: None if no model was recorded as the best one."""

    first: tuple[int, float]
    last: tuple[int, float]
    margin: float
    best: Best | None

    @property
    def difference(self) -> float:
        return self.last[1] - self.first[1]

    @property
    def outcome(self) -> str:
        """better | worse | unchanged | unknown (no interval, or one evaluation)."""
        if self.first[0] == self.last[0] or not math.isfinite(self.difference + self.margin):
            return "unknown"
        if abs(self.difference) <= self.margin:
            return "unchanged"
        return "better" if self.difference > 0 else "worse"

    @property
    def text(self) -> str:
        """One line, such as: held-out 0.225 -> 0.000 (worse: -0.225 +- 0.144); best: 0.225 at step 0, PATH."""
        (before, score), (after, newest) = self.first, self.last
        margin = "" if math.isnan(self.margin) else f" +- {self.margin:.3f}"
        if before == after:
            scores = f"held-out {score:.3f}{margin} at step {before}, the only evaluation"
        else:
            change = f"{self.outcome}: {self.difference:+.3f}{margin}" if margin else "interval unknown"
            scores = f"held-out {score:.3f} -> {newest:.3f} ({change})"
        best = f"; best: {self.best.score:.3f} at step {self.best.step}, {self.best.model}" if self.best else ""
        return scores + best

    @property
    def facts(self) -> dict[str, Any]:
        """The entry of result.json."""
        numbers = {"difference": self.difference, "margin": self.margin}
        return {"outcome": self.outcome, **numbers, "text": self.text}


def verdict_of(lines: Iterable[MetricsLine], best: Best | None, steps: Collection[int] | None = None) -> Verdict | None:
    """The verdict by the metrics of a run; None without an evaluation. steps: of the evaluations that are comparable;
    None = all."""
    evals = [
        (line.step, line.metrics["eval/mean_at_k"], line.metrics.get("eval/standard_error", math.nan))
        for line in lines
        if "eval/mean_at_k" in line.metrics and (steps is None or line.step in steps)
    ]
    if not evals:
        return None
    (first, score, error), (last, newest, newest_error) = evals[0], evals[-1]
    error = math.hypot(error, newest_error) if len(evals) > 1 else error
    return Verdict((first, score), (last, newest), Z * error, best)


def read_verdict(folder: Path, steps: Collection[int] | None = None) -> Verdict | None:
    """The verdict by the files of a run, also of a running one; None if they have no evaluation or can't be read."""
    try:
        comparable = steps if steps is not None else compared_steps(folder)
        return verdict_of(read_metrics(folder / "metrics.jsonl")[0], read_best(folder), comparable)
    except MeshrlError:
        return None


def compared_steps(folder: Path) -> set[int] | None:
    """The steps of the evaluations in result.json: those of another loop.eval_term are not among them. None without
    them. Raises: DataError."""
    path = folder / "result.json"
    result = read_object(path) if path.is_file() else {}
    with data_errors(str(path), "the result of a run"):
        return {int(found["step"]) for found in result.get("evals", ())} or None
