"""The verdict on a run: whether its held-out score has changed by more than chance explains, and its best model.

The interval of a difference is 1.96 standard errors wide on each side (95 %): the root of the sum of the squares of
`eval/standard_error` of both evaluations, as if their prompts were different ones. Equal prompts mostly make the real
interval narrower.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.core.errors import MeshrlError
from meshrl.monitor.jsonl import data_errors
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
        """As outcome_of; also unknown with one evaluation."""
        if self.first[0] == self.last[0]:
            return "unknown"
        return outcome_of(self.difference - self.margin, self.difference + self.margin)

    @property
    def text(self) -> str:
        """One line, such as: held-out 0.225 -> 0.000 (worse: -0.225 +- 0.144); best: 0.225 at step 0."""
        (before, score), (after, newest) = self.first, self.last
        margin = "" if math.isnan(self.margin) else f" +- {self.margin:.3f}"
        if before == after:
            scores = f"held-out {score:.3f}{margin} at step {before}, the only evaluation"
        else:
            is_known = self.outcome != "unknown"
            change = f"{self.outcome}: {self.difference:+.3f}{margin}" if is_known else "interval unknown"
            scores = f"held-out {score:.3f} -> {newest:.3f} ({change})"
        return scores + (f"; best: {self.best.score:.3f} at step {self.best.step}" if self.best else "")

    @property
    def lines(self) -> list[str]:
        """The text, and a line with the path of the best model."""
        return [self.text, *([f"best model: {self.best.model}"] if self.best else [])]

    @property
    def facts(self) -> dict[str, Any]:
        """The entry of result.json."""
        return {"outcome": self.outcome, "difference": self.difference, "margin": self.margin, "text": self.text}


def outcome_of(low: float, high: float) -> str:
    """By the interval of a difference: better (all of it is above 0) | worse (below 0) | unchanged | unknown (not
    finite)."""
    if not math.isfinite(low + high):
        return "unknown"
    return "better" if low > 0 else "worse" if high < 0 else "unchanged"


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


def read_verdict(folder: Path, evals: Iterable[tuple[int, float]]) -> Verdict | None:
    """The verdict by the files of a run. evals: (finished steps, score) of the comparable evaluations. None without
    these, or if the files can't be read."""
    try:
        lines, _ = read_metrics(folder / "metrics.jsonl")
        return verdict_of(lines, read_best(folder), {step for step, _ in evals})
    except MeshrlError:
        return None


def compared_steps(result: Mapping[str, Any]) -> set[int] | None:
    """The steps of the evaluations in a run's result: those of another loop.eval_term are not among them. None without
    them. Raises: DataError."""
    with data_errors("result.json", "the result of a run"):
        return {int(found["step"]) for found in result.get("evals", ())} or None
