"""Step time, idle time and staleness of one setup."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.monitor.sinks import duration
from meshrl.tools.schedule.setup import Setup
from meshrl.tools.schedule.simulate import Timeline, simulate

FIRST_STEPS = 3  # not counted, because samplers and trainer do not yet overlap as later


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over steps. train_idle, rollout_idle: the fraction of a step in which a rank of that side has nothing to
    do; idle: of all GPUs."""

    timeline: Timeline
    step_s: float
    train_idle: float
    rollout_idle: float
    idle: float
    staleness: float
    max_staleness: int

    @property
    def setup(self) -> Setup:
        return self.timeline.setup


def predict(setup: Setup, first: int = FIRST_STEPS) -> Prediction:
    """Simulate, and measure the steps from number `first` on, without the last ones, in which no groups start."""
    timeline = simulate(setup)
    ends = timeline.ends
    last = max(first + 1, len(ends) - 1 - setup.max_staleness)
    start, end = ends[first - 1], ends[last - 1]
    wall = end - start
    trained = sum(_inside(span.start, span.end, start, end) for span in timeline.spans)
    sampled = [sum(_inside(*interval, start, end) for interval in busy) for busy in timeline.busy]
    train_idle, rollout_idle = 1 - trained / wall, 1 - sum(sampled) / len(sampled) / wall
    if setup.rollout_ranks:
        ranks = setup.train_ranks + setup.rollout_ranks
        idle = (train_idle * setup.train_ranks + rollout_idle * setup.rollout_ranks) / ranks
    else:  # the same ranks do both
        idle = train_idle + rollout_idle - 1
    stale = [s for step in timeline.staleness[first:last] for s in step]
    return Prediction(
        timeline=timeline,
        step_s=wall / (last - first),
        train_idle=train_idle,
        rollout_idle=rollout_idle,
        idle=max(0.0, idle),
        staleness=sum(stale) / max(1, len(stale)),
        max_staleness=max(stale, default=0),
    )


def _inside(start: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(start, low))


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else duration(value)
