"""The verdict on a run: whether its held-out score has changed by more than chance explains, and its best model.

The interval of a difference is 1.96 standard errors wide on each side (95 %): the root of the sum of the squares of
`eval/standard_error` of both evaluations, as if their prompts were different ones. Equal prompts mostly make the real
interval narrower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.loop import WEIGHTED_SUM
from meshrl.core.best_models import Best, read_best
from meshrl.core.errors import MeshrlError
from meshrl.monitor.sinks import MetricsLine, read_metrics

HELD_OUT = "eval/mean_at_k"
Z = 1.96
"""Standard errors on each side of a 95 % interval."""
_EXTREMES = ("eval/score_min", "eval/score_max")


@dataclass(frozen=True, slots=True)
class Verdict:
    """first, last: (finished steps, held-out score). margin: half of the width of the interval of their difference, or
    of the only score; NaN if the run has no standard errors. best: None if no model was recorded as the best one of
    these evaluations. name: such as `held-out reward`, as name_of. limits: as limits_of."""

    first: tuple[int, float]
    last: tuple[int, float]
    margin: float
    best: Best | None
    name: str = "held-out"
    limits: tuple[float, float] = (-math.inf, math.inf)

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
    def measured(self) -> str:
        """The difference, or the only score, with its interval."""
        low, high = self.limits
        if self.first[0] == self.last[0]:
            return with_interval(self.first[1], self.margin, low, high)
        return with_interval(self.difference, self.margin, low - high, high - low, "+")

    @property
    def text(self) -> str:
        """One line, such as: held-out reward 0.225 -> 0.000 (worse: -0.225 +- 0.144); best: 0.225 at step 0."""
        (before, score), (after, newest) = self.first, self.last
        if before == after:
            scores = f"{self.name} {self.measured} at step {before}, the only evaluation"
        else:
            change = f"{self.outcome}: {self.measured}" if self.outcome != "unknown" else "interval unknown"
            scores = f"{self.name} {score:.3f} -> {newest:.3f} ({change})"
        return scores + (f"; best: {self.best.score:.3f} at step {self.best.step}" if self.best else "")

    @property
    def lines(self) -> list[str]:
        """The text, and a line with the path of the best model."""
        return [self.text, *([f"best model: {self.best.model}"] if self.best else [])]

    @property
    def facts(self) -> dict[str, Any]:
        """The entry of result.json."""
        return {"outcome": self.outcome, "difference": self.difference, "margin": self.margin, "text": self.text}


def with_interval(value: float, margin: float, low: float, high: float, sign: str = "") -> str:
    """Such as `0.225 +- 0.135`; with both ends where a limit of the value, low or high, is in the interval: `1.000,
    0.932 to 1.000`. sign: "+" shows that of a difference."""
    ends = max(value - margin, low), min(value + margin, high)
    if math.isnan(margin) or ends == (value - margin, value + margin):
        return f"{value:{sign}.3f}" + ("" if math.isnan(margin) else f" +- {margin:.3f}")
    return f"{value:{sign}.3f}, {ends[0]:{sign}.3f} to {ends[1]:{sign}.3f}"


def name_of(evals: Sequence[MetricsLine]) -> str:
    """Such as: held-out reward; of a term: held-out answer; held-out, if it is not known what scores."""
    term = evals[-1].evaluation.get("term", "") if evals else ""
    return f"held-out {'reward' if term == WEIGHTED_SUM else term}".strip()


def limits_of(evals: Iterable[MetricsLine]) -> tuple[float, float]:
    """(0, 1) if the scores of all answers of these evaluations are within it, else without limits."""
    found = [m.get(name, m[HELD_OUT]) for m in (line.metrics for line in evals) for name in _EXTREMES]
    return (0.0, 1.0) if all(0 <= score <= 1 for score in found) else (-math.inf, math.inf)


def outcome_of(low: float, high: float) -> str:
    """By the interval of a difference: better (all of it is above 0) | worse (below 0) | unchanged | unknown (not
    finite)."""
    if not math.isfinite(low + high):
        return "unknown"
    return "better" if low > 0 else "worse" if high < 0 else "unchanged"


def evaluations(lines: Iterable[MetricsLine]) -> list[MetricsLine]:
    """The lines of evaluations with the identity of the last one, and of each step the last line. Scores of other
    held-out rows, graders or sampling are not comparable, and a run that continues with such evaluates its step again.
    """
    scored = [line for line in lines if HELD_OUT in line.metrics]
    return list({line.step: line for line in scored if line.evaluation == scored[-1].evaluation}.values())


def verdict_of(evals: list[MetricsLine], best: Best | None) -> Verdict | None:
    """The verdict by these `evaluations`; None if there are none."""
    if not evals:
        return None
    ends = [(line.step, line.metrics[HELD_OUT]) for line in (evals[0], evals[-1])]
    errors = [line.metrics.get("eval/standard_error", math.nan) for line in evals[:1] + evals[1:][-1:]]
    own = best if best is not None and best.evaluation == evals[-1].evaluation else None
    return Verdict(ends[0], ends[1], Z * math.hypot(*errors), own, name_of(evals), limits_of(evals))


def read_verdict(folder: Path) -> Verdict | None:
    """The verdict by the files of a run; None without an evaluation, or if they can't be read."""
    try:
        lines, _ = read_metrics(folder / "metrics.jsonl")
        return verdict_of(evaluations(lines), read_best(folder))
    except MeshrlError:
        return None
