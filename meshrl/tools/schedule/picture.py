"""The timelines of some schedules as one SVG file: which groups are sampled while which step is trained."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from meshrl.monitor.sinks import duration
from meshrl.tools.page.charts import Scale, ticks
from meshrl.tools.schedule.sampler import SimulatedGroup
from meshrl.tools.schedule.simulate import FIRST_STEPS, Prediction, Simulation

WIDTH, LEFT, RIGHT = 960, 76, 944
TITLE, ROLLOUT, GAP, TRAIN, AXIS = 40, 96, 6, 30, 30  # heights in a panel
LEGEND_HEIGHT = 46
LEGEND = (
    "A bar is a group of answers, from its start until it is scored; it has the colour of the step that trains it.",
    "Black: a sync of weights (the dotted line shows it in both rows). Grey: nothing to do.",
)
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#d4a72c", "#72b7b2")  # of steps, repeated
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 } .title { font-weight: 600; font-size: 14px }
.dim { fill: #666 } .on { fill: #fff; font-size: 11px } .back { fill: #f3f4f6 } .axis { stroke: #999 }
.sync { fill: #222 } .cut { stroke: #222; stroke-width: 1; stroke-dasharray: 2 3; opacity: .55 } .page { fill: #fff }
"""


def picture(predictions: Sequence[Prediction]) -> str:
    """One panel for each prediction, all on the same scale of time."""
    window = 4 * max(prediction.step_s for prediction in predictions)  # of the slowest schedule
    panel = TITLE + ROLLOUT + GAP + TRAIN + AXIS
    height = panel * len(predictions) + LEGEND_HEIGHT
    parts = [f'<rect class="page" width="{WIDTH}" height="{height}"/>']
    for index, prediction in enumerate(predictions):
        parts += [f'<g transform="translate(0 {index * panel})">', *_panel(prediction, window), "</g>"]
    top = panel * len(predictions) + 14
    parts += [f'<text class="dim" x="{LEFT}" y="{top + 17 * i}">{text}</text>' for i, text in enumerate(LEGEND)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _panel(prediction: Prediction, window: float) -> list[str]:
    sim, setup = prediction.sim, prediction.setup
    start = sim.ends[min(FIRST_STEPS, len(sim.ends)) - 1]
    x = Scale(start, start + window, LEFT, RIGHT)
    below = TITLE + ROLLOUT + GAP
    ranks = f"{setup.train_ranks} ranks train and sample in turn"
    if setup.rollout_ranks:
        ranks = f"{setup.train_ranks} train + {setup.rollout_ranks} sampler ranks, max_staleness {setup.loop.staleness}"
    caption = f"{seconds(prediction.step_s)} for a step; idle: training {prediction.train_idle:.0%}, "
    caption += f"sampling {prediction.rollout_idle:.0%}; mean staleness {prediction.staleness:.1f}"
    parts = [
        f'<text class="title" x="{LEFT}" y="18">{setup.loop.kind}: {ranks}</text>',
        f'<text class="dim" x="{LEFT}" y="34">{html.escape(caption)}</text>',
        f'<rect class="back" x="{LEFT}" y="{TITLE}" width="{RIGHT - LEFT}" height="{ROLLOUT}"/>',
        f'<rect class="back" x="{LEFT}" y="{below}" width="{RIGHT - LEFT}" height="{TRAIN}"/>',
        f'<text x="{LEFT - 8}" y="{TITLE + ROLLOUT / 2 + 4}" text-anchor="end">sampling</text>',
        f'<text x="{LEFT - 8}" y="{below + TRAIN / 2 + 4}" text-anchor="end">training</text>',
    ]
    axis = below + TRAIN + 2
    parts += [*_groups(sim, x), *_steps(sim, x, below), f'<path class="axis" d="M{LEFT} {axis}H{RIGHT}"/>']
    for tick in ticks(0.0, window, 8):
        at = x(x.low + tick)
        parts.append(f'<path class="axis" d="M{at} {axis}v4"/>')
        parts.append(f'<text class="dim" x="{at}" y="{axis + 16}" text-anchor="middle">{seconds(tick)}</text>')
    return parts


def _groups(sim: Simulation, x: Scale) -> list[str]:
    """A bar for each group, from its start until it is scored. A group takes the first free lane."""
    free: list[float] = []  # by lane: when it is free again
    bars: list[tuple[int, SimulatedGroup, float]] = []
    for group in sim.groups:
        end = group.scored_at if group.is_scored else math.inf
        lane = next((i for i, until in enumerate(free) if until <= group.started_at), len(free))
        free[lane : lane + 1] = [end]
        if _overlaps(x, group.started_at, end):
            bars.append((lane, group, end))
    lanes = max((lane for lane, _, _ in bars), default=0) + 1
    height = ROLLOUT / lanes
    gap = 1.0 if height >= 4 else 0.0
    return [
        f'<rect fill="{_colour(group.step)}" x="{x(group.started_at)}" y="{TITLE + lane * height:.2f}" '
        f'width="{max(0.5, x(end) - x(group.started_at)):.1f}" height="{max(0.3, height - gap):.2f}"/>'
        for lane, group, end in bars
    ]


def _steps(sim: Simulation, x: Scale, top: float) -> list[str]:
    """The training of each step, and its sync with a line through both rows."""
    parts = []
    for span in sim.spans:
        if not _overlaps(x, span.start, span.end):
            continue
        left, width = x(span.start), max(1.0, x(span.end) - x(span.start))
        if span.phase == "sync":
            parts.append(f'<rect class="sync" x="{left}" y="{top}" width="{width:.1f}" height="{TRAIN}"/>')
            parts.append(f'<path class="cut" d="M{left + width / 2:.1f} {TITLE - 2}V{top}"/>')
            continue
        box = f'x="{left}" y="{top}" width="{width:.1f}" height="{TRAIN}"'
        parts.append(f'<rect fill="{_colour(span.step)}" {box}/>')
        for text in (f"step {span.step + 1}", f"{span.step + 1}"):
            if 7 * len(text) + 4 < width:
                place = f'x="{left + width / 2:.1f}" y="{top + TRAIN / 2 + 4}" text-anchor="middle"'
                parts.append(f'<text class="on" {place}>{text}</text>')
                break
    return parts


def _overlaps(x: Scale, start: float, end: float) -> bool:
    return end > x.low and start < x.high


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else duration(value)


def _colour(step: int | None) -> str:
    return "#bbbbbb" if step is None else COLOURS[step % len(COLOURS)]
