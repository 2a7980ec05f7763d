"""The verdict on a run: whether its held-out score has changed by more than chance explains, and its best model.

The interval of a difference is 1.96 standard errors wide on each side (95 %): the root of the sum of the squares of
`eval/standard_error` of both evaluations, as if their prompts were different ones. Equal prompts mostly make the real
interval narrower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.loop import WEIGHTED_SUM
from meshrl.core.errors import MeshrlError
from meshrl.monitor.sinks import MetricsLine, read_metrics
from meshrl.run.folder import Best, read_best

HELD_OUT = "eval/mean_at_k"
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


def evaluations(lines: Iterable[MetricsLine], term: str | None) -> list[MetricsLine]:
    """The lines of evaluations by this loop.eval_term, None = by any, and of each step the last one: a run that
    continues with another term evaluates its step again. Scores of another term are not comparable."""
    own, by_step = "eval/reward/mean" if term == WEIGHTED_SUM else f"eval/reward/term/{term}", dict[int, MetricsLine]()
    for line in lines:
        score = line.metrics.get(HELD_OUT)
        if score is not None and not abs(line.metrics.get(own, score) - score) > 1e-6 * max(1.0, abs(score)):
            by_step[line.step] = line
    return list(by_step.values())


def verdict_of(evals: list[MetricsLine], best: Best | None) -> Verdict | None:
    """The verdict by these `evaluations`; None if there are none."""
    if not evals:
        return None
    ends = [(line.step, line.metrics[HELD_OUT]) for line in (evals[0], evals[-1])]
    errors = [line.metrics.get("eval/standard_error", math.nan) for line in evals[:1] + evals[1:][-1:]]
    return Verdict(ends[0], ends[1], Z * math.hypot(*errors), best)


def read_verdict(folder: Path, term: str) -> Verdict | None:
    """The verdict by the files of a run; None without an evaluation by this term, or if they can't be read."""
    try:
        lines, _ = read_metrics(folder / "metrics.jsonl")
        return verdict_of(evaluations(lines, term), read_best(folder))
    except MeshrlError:
        return None
