"""Rules over the metrics of a run: what is wrong, what it means, what to try (docs/health.md).

health.json has the rules; those without a text of their own have the glossary's. A rule holds if all conditions of one
line of `when` do: a metric, a kind of MEASURES and a limit, such as `rollout/truncated_fraction newest > 0.2`. A rule
whose metrics a run does not record is silent. A finding begins when its rule holds at `hold` checks in succession, and
ends when it does not at _CLEAR of them. The newest and the first values are means over a tenth of the curve, of 5 to 50
values; a curve that is too short is not judged.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from statistics import median

from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.sinks import MetricsLine

_AT_LEAST, _AT_MOST, _CLEAR, _MAX_CHECKS = 5, 50, 5, 400


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one metric that are not NaN, and their steps."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


Curves = Mapping[str, Curve]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # unlike fmean, also of opposite infinities: NaN


def _size(values: Sequence[float], at_least: int = _AT_LEAST) -> int:
    return min(_AT_MOST, max(at_least, len(values) // 10))


def _newest(values: Sequence[float]) -> float:
    return _mean(values[-_size(values) :])


def _first(values: Sequence[float]) -> float:
    return _mean(values[: _size(values)])


def _ratio(value: float, to: float) -> float:
    return value / to if to > 0 else math.nan


def _in_errors(difference: float, values: Sequence[float], size: int) -> float:
    """A difference of two means of so many values in its standard errors, by the noise from step to step."""
    noise = median(abs(b - a) for a, b in zip(values[-_AT_MOST:], values[-_AT_MOST + 1 :])) / 0.954
    return difference / (noise * math.sqrt(2 / size)) if noise > 0 else math.copysign(math.inf, difference)


def _spikes(values: Sequence[float]) -> float:
    late = values[len(values) // 2 :]
    middle = median(late)
    return sum(value > 10 * middle > 0 for value in late) / len(late)


def _settled(values: Sequence[float]) -> float:
    """The first three steps are those of a start."""
    size = _size(values, 10)
    return _ratio(median(values[-size:]), median(values[3 : 3 + size]))


def _growing(values: Sequence[float]) -> float:
    size = _size(values, 10)
    return _ratio(median(values[-size:]), median(values[-2 * size : -size]))


def _of_values(measure: Callable[[Sequence[float]], float]) -> Callable[[Curves, str], float]:
    return lambda curves, name: measure(curves[name].values)


def _reached(curves: Curves, name: str) -> float:
    low, high = (f(curves[n].values) for f, n in ((min, "reward/min"), (max, "reward/max")))
    return (_newest(curves[name].values) - low) / (high - low) if high > low else 0.0


def _untrained(curves: Curves, name: str) -> float:
    """A step without an optimizer step has no gradient norm; that of a skipped one is NaN."""
    steps = curves[name].steps[-_AT_LEAST:]
    return 1 - len({*steps} & {*curves.get("train/grad_norm", Curve()).steps[-_AT_LEAST:]}) / len(steps)


def _drop(curves: Curves, name: str) -> float:
    scores, errors = curves[name].values, curves["eval/standard_error"].values
    if len(scores) != len(errors):
        return math.nan
    best = scores.index(max(scores))
    error = math.hypot(errors[best], errors[-1])
    return (scores[best] - scores[-1]) / error if error > 0 else math.nan


def _since_best(curves: Curves, name: str) -> float:
    held_out, curve = curves["eval/mean_at_k"], curves[name]
    best = held_out.steps[held_out.values.index(max(held_out.values))]
    num_before = max(_AT_LEAST, sum(step <= best for step in curve.steps))
    before = _mean(curve.values[num_before - _AT_LEAST : num_before])
    return _in_errors(_newest(curve.values) - before, curve.values, _AT_LEAST)


def _paid(curves: Curves, name: str) -> float:
    """Of what the other terms have gained since this one was at its best; 0 if that is not more than its noise."""
    values, total = curves[name].values, curves["reward/mean"].values
    if len(values) != len(total):
        return math.nan
    size = _size(values)
    best = max(range(0, len(values) - size + 1, size), key=lambda i: _mean(values[i : i + size]))
    fall = _mean(values[best : best + size]) - _newest(values)
    rise = _newest(total) - _mean(total[best : best + size])
    return fall / (rise + fall) if rise > 0 and fall > 0 and _in_errors(fall, values, size) > 4 else 0.0


def _slowdown(curves: Curves, name: str) -> float:
    """Tokens a second: of the slower steps after the start, by the faster ones of the newest; or, if that is less, how
    much longer steps take."""
    speed, tokens = curves[name].values, curves["train/num_tokens"].values
    if len(speed) != len(tokens):
        return math.nan
    size = _size(speed, 10)
    slow, fast = sorted(speed[3 : 3 + size])[size // 4], sorted(speed[-size:])[-1 - size // 4]
    return min(_ratio(slow, fast), _settled([n / v if v > 0 else math.inf for n, v in zip(tokens, speed)]))


MEASURES: dict[str, tuple[Callable[[Curves, str], float], int, str]] = {
    "latest": (_of_values(lambda values: values[-1]), 1, "the last value {}"),
    "recent": (_of_values(lambda values: max(values[-10:])), 1, "one of the last ten values {}"),
    "newest": (_of_values(_newest), _AT_LEAST, "the newest values {}"),
    "change": (
        _of_values(lambda v: _ratio(_newest(v), _first(v))),
        2 * _AT_LEAST,
        "the newest values {} times the first ones",
    ),
    "shrunk": (
        _of_values(lambda v: _ratio(_newest(v), max(v[: _size(v)]))),
        2 * _AT_LEAST,
        "the newest values {} times the largest of the first ones",
    ),
    "grown": (
        _of_values(lambda v: _ratio(_newest(v), min(v[: _size(v)]))),
        2 * _AT_LEAST,
        "the newest values {} times the smallest of the first ones",
    ),
    "added": (
        _of_values(lambda v: _newest(v) - min(v[: _size(v)])),
        2 * _AT_LEAST,
        "the newest values {} more than the smallest of the first ones",
    ),
    "spikes": (_of_values(_spikes), 4 * _AT_LEAST, "a share {} of the newer half above 10 times its median"),
    "settled": (_of_values(_settled), 25, "the newest values {} times those after the start"),
    "growing": (_of_values(_growing), 25, "the newest values {} times those before them"),
    "reached": (_reached, 1, "the newest values {} of the range of the rewards"),
    "untrained": (_untrained, _AT_LEAST, "the share of the last steps without a finite gradient {}"),
    "drop": (_drop, 2, "the best score minus the newest one {} standard errors"),
    "since_best": (_since_best, _AT_LEAST, "the rise since the best held-out score {} standard errors"),
    "paid": (_paid, 2 * _AT_LEAST, "the fall {} of what the other terms have gained"),
    "slowdown": (_slowdown, 25, "steps and tokens take a time {} times that after the start"),
}
"""Kind -> what is measured, of at least how many values, and the condition in words."""


@dataclass(frozen=True, slots=True)
class Condition:
    """`*` in the name of the metric stands for any text: then one such metric is enough."""

    metric: str
    measure: str
    is_above: bool
    limit: float

    @property
    def text(self) -> str:
        return MEASURES[self.measure][2].format(f"{'above' if self.is_above else 'below'} {self.limit:g}")

    def reason(self, curves: Curves) -> tuple[str, str] | None:
        """The metric, and what is wrong with the measured value; None if nothing is, or if it can't be judged."""
        measure, at_least, _ = MEASURES[self.measure]
        for name in fnmatch.filter(curves, self.metric):
            try:
                value = measure(curves, name) if len(curves[name].values) >= at_least else math.nan
            except (KeyError, ValueError, ZeroDivisionError, OverflowError):  # another metric is missing or too short
                continue
            if value > self.limit if self.is_above else value < self.limit:
                return name, f"{self.text} (here {value:.3g})"
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """when: alternatives, each with conditions that hold together; the first one names the metric of a finding."""

    name: str
    when: Sequence[Sequence[Condition]]
    means: str
    advice: str
    hold: int

    def reason(self, curves: Curves) -> tuple[str, str] | None:
        for conditions in self.when:
            reasons = [condition.reason(curves) for condition in conditions]
            if all(reasons):
                return reasons[0]
        return None


def _condition(text: str) -> Condition:
    metric, measure, sign, limit = text.split()
    return Condition(metric, measure, sign == ">", float(limit))


def _rule(name: str, when: Sequence[str], means: str = "", advice: str = "", hold: int = 3) -> Rule:
    return Rule(name, [[*map(_condition, text.split(" and "))] for text in when], means, advice, hold)


_FILE = resources.files("meshrl.monitor").joinpath("health.json")
RULES = [_rule(**each) for each in json.loads(_FILE.read_text(encoding="utf-8"))]


@dataclass(slots=True)
class HealthFinding:
    """A rule that holds. since: the first step. until: the step at which it ended; None = it holds. reason: with the
    newest measured value."""

    rule: Rule
    since: int
    metric: str
    reason: str
    until: int | None = None

    @property
    def means(self) -> str:
        meaning = meaning_of(self.metric)
        return self.rule.means or (meaning.entry.otherwise if meaning is not None else "")

    @property
    def text(self) -> str:
        """One line for a terminal."""
        if self.until is not None:
            return f"health: step {self.until}: {self.rule.name} has ended; it began at step {self.since}"
        advice = f" Try: {self.rule.advice}" if self.rule.advice else ""
        return f"health: {self.rule.name} since step {self.since}: {self.metric}: {self.reason}. {self.means}{advice}"


class Health:
    """What the rules find in the lines of a run, one after the other. findings: in the order of their beginnings."""

    def __init__(self, lines: Sequence[MetricsLine] = ()) -> None:
        self.findings: list[HealthFinding] = []
        self._curves: dict[str, Curve] = {}
        self._evaluation: Mapping[str, str] = {}
        self._since: dict[str, tuple[int, int]] = {}  # of rules that hold: the first step, and the number of checks
        self._clear: dict[str, int] = {}
        every = max(1, len(lines) // _MAX_CHECKS)
        for number, line in enumerate(lines, start=1):
            self.record(line.step, line.metrics, line.evaluation)
            if number % every == 0 or number == len(lines):
                self.check(line.step)

    @property
    def open(self) -> list[HealthFinding]:
        return [finding for finding in self.findings if finding.until is None]

    def record(self, step: int, values: Mapping[str, float], evaluation: Mapping[str, str]) -> None:
        """Scores of evaluations with another identity are not comparable, so they begin new curves."""
        if evaluation and evaluation != self._evaluation:
            self._evaluation = evaluation
            for name in [name for name in self._curves if name.partition("/")[0] == "eval"]:
                del self._curves[name]
        for name, value in values.items():
            if not math.isnan(value):
                curve = self._curves.setdefault(name, Curve())
                curve.steps.append(step)
                curve.values.append(value)

    def check(self, step: int) -> list[HealthFinding]:
        """The findings that begin or end at this step."""
        changed, by_name = [], {finding.rule.name: finding for finding in self.open}
        for rule in RULES:
            finding, reason = by_name.get(rule.name), rule.reason(self._curves)
            if reason is None:
                self._since.pop(rule.name, None)
                self._clear[rule.name] = self._clear.get(rule.name, 0) + 1
                if finding is not None and self._clear[rule.name] >= _CLEAR:
                    finding.until = step
                    changed.append(finding)
                continue
            since, count = self._since.get(rule.name, (step, 0))
            self._since[rule.name], self._clear[rule.name] = (since, count + 1), 0
            if finding is not None:
                finding.metric, finding.reason = reason
            elif count + 1 >= rule.hold:
                changed.append(HealthFinding(rule, since, *reason))
                self.findings.append(changed[-1])
        return changed


class HealthSink:
    """Notes each finding once when it begins, and once when it ends. evaluation: returns the identity of the evaluation
    that is written. show: called with the rules that hold, after each change."""

    def __init__(
        self,
        note: Callable[[str], None],
        evaluation: Callable[[], Mapping[str, str]],
        show: Callable[[Sequence[str]], None],
    ) -> None:
        self._note, self._evaluation, self._show = note, evaluation, show
        self._health = Health()

    def restart(self, lines: Iterable[MetricsLine]) -> None:
        """Continue a run that has written these lines."""
        self._health = Health([*lines])
        self._show([finding.rule.name for finding in self._health.open])

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        identity = self._evaluation() if "eval/mean_at_k" in values else {}
        self._health.record(step, values, identity)
        for finding in self._health.check(step):
            self._note(finding.text)
            self._show([finding.rule.name for finding in self._health.open])

    def close(self, failed: bool = False) -> None:
        pass
