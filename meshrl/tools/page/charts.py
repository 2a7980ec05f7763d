"""Curves and stacked bars as SVG texts, and figures of them with a legend and a table of the values.

Colours are the page's CSS classes, which have a light and a dark mode.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.sinks import mean_of_known, number, split

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 58, WIDTH - 16, 10, HEIGHT - 24
MAX_POINTS = 240  # if there are more, equal parts are averaged


OTHER = 6  # the grey among the colours of the style sheet
COLOURS = {"rollout": 2, "reward": 5, "train": 0, "sync": 3, "eval": 1, "export": 4, "save": 4, "wait": 6}
"""By phase, in the order of a step, on all pages; other phases are grey."""

Style = Literal["noisy", "plain", "dots"]
"""noisy: pale, with its moving average."""


@dataclass(frozen=True, slots=True)
class Line:
    """Non-finite values are gaps. low, high: an interval around each value, drawn as a band."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    style: Style = "plain"
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts a value to its position between two edges of the drawing."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)


def figure(title: str, unit: str, lines: Sequence[Line], across: str = "step") -> str:
    """A captioned line chart with its legend; "" if there is nothing to draw. In the legend, a pointer at the name of a
    metric shows what is healthy. across: the quantity of the horizontal axis."""
    if not (drawing := line_chart(lines, unit, across)):
        return ""
    legend = "".join(
        f'<span title="{html.escape(meaning.entry.healthy) if (meaning := meaning_of(line.label)) else ""}">'
        f'<i class="k{i}"></i><code>{html.escape(line.label)}</code> '
        f"<b>{number(line.values[-1], unit)}</b></span>"
        for i, line in enumerate(lines)
    )
    caption = f"{html.escape(title)}<small>{html.escape(unit)}</small>"
    return (
        f'<figure><figcaption><b>{caption}</b><span class="at"></span></figcaption>'
        f'<div class="legend">{legend}</div>{drawing}</figure>'
    )


def line_chart(lines: Sequence[Line], unit: str, across: str = "step") -> str:
    """Lines over finished steps, or over another quantity, with axes. The element also contains the values, for the
    page's script."""
    drawn = [_thinned(line) for line in lines]
    steps = sorted({s for line in drawn for s in line.steps})
    ends = [v for line in drawn for v in (*line.values, *line.low, *line.high)]
    values = [v for v in ends if math.isfinite(v)]
    if not values:
        return ""
    to_x = Scale(steps[0], steps[-1], LEFT, RIGHT)
    up = Scale(*_range(values, unit), BOTTOM, TOP)
    parts = [*_axes(to_x, up, unit, across)]
    for index, line in enumerate(drawn):
        parts += _band(line, index, to_x, up) + _curve(line, index, to_x, up)
    data = {
        "steps": steps,
        "lines": [_by_step(line, steps, unit) for line in drawn],
        "x": [to_x(step) for step in steps],
        "across": across,
    }
    label = f"{', '.join(line.label for line in lines)} in {unit or 'plain numbers'} over {across}"
    return _svg(parts, label, html.escape(json.dumps(data)))


def stacked_chart(layers: Mapping[str, Mapping[int, float]], colours: Sequence[int], max_bars: int = 60) -> str:
    """One bar for each step (with many steps, one bar for the mean of several), with layers stacked in the given order.

    layers: seconds by name and finished steps. colours: one for each layer.
    """
    steps = sorted({step for layer in layers.values() for step in layer})
    bars = split(steps, max_bars)
    count = len(bars)
    heights = {n: [sum(layer.get(s, 0.0) for s in bar) / len(bar) for bar in bars] for n, layer in layers.items()}
    top = max((sum(column) for column in zip(*heights.values())), default=0.0)
    if top <= 0:
        return ""
    up = Scale(0.0, top * 1.05, BOTTOM, TOP)
    edge = Scale(0, count, LEFT, RIGHT)
    gap = 1 if count > 20 else 3
    middles = Scale(steps[0], steps[-1], (edge(0) + edge(1)) / 2, (edge(count - 1) + edge(count)) / 2)
    parts = _axes(middles, up, "s", "step")
    for i in range(count):
        base = 0.0
        for colour, (name, column) in zip(colours, heights.items()):
            y, lower = up(base + column[i]), up(base)
            base += column[i]
            if lower > y:
                x, width = edge(i) + gap / 2, edge(i + 1) - edge(i) - gap
                box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{lower - y:.1f}"'
                tip = f"{html.escape(name)} {number(column[i], 's')}"
                parts.append(f'<rect class="f{colour}" {box}><title>{tip}</title></rect>')
    return _svg(parts, f"{', '.join(layers)} in seconds over step")


def sparkline(values: Sequence[float]) -> str:
    """A small curve without axes."""
    thin = _thinned(Line("", range(len(values)), values)).values
    finite = [v for v in thin if math.isfinite(v)]
    if len(finite) < 2:
        return ""
    across, up = Scale(0, len(thin) - 1, 1, 89), Scale(min(finite), max(finite), 16, 2)
    curve = _path(range(len(thin)), thin, across, up, "l0")
    return f'<svg class="spark" aria-hidden="true" viewBox="0 0 90 18">{curve}</svg>'


def _svg(parts: list[str], label: str, data: str = "") -> str:
    about = f'role="img" aria-label="{html.escape(label)}"' + (f' data-chart="{data}"' if data else "")
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" {about}>{"".join(parts)}</svg>'


def _thinned(line: Line) -> Line:
    if len(line.values) <= MAX_POINTS or line.style == "dots":
        return line
    values, low, high = (
        [mean_of_known(part) for part in split(column, MAX_POINTS)] for column in (line.values, line.low, line.high)
    )
    return Line(line.label, [part[-1] for part in split(line.steps, MAX_POINTS)], values, line.style, low, high)


def _range(values: Sequence[float], unit: str) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high == 0 or (unit == "fraction" and low >= 0 and 0.5 < high <= 1):
        return 0.0, 1.0
    if 0 <= low <= 0.6 * high:  # the axis starts at 0, unless the curve would then be almost flat
        return 0.0, high * 1.05
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def _band(line: Line, index: int, across: Scale, up: Scale) -> list[str]:
    """The area between `low` and `high`; a single point gets a bar."""
    points = [(across(s), up(a), up(b)) for s, a, b in zip(line.steps, line.low, line.high) if math.isfinite(a + b)]
    if not points:
        return []
    if len(points) == 1:
        x, a, b = points[0]
        return [f'<path class="l{index} thin" d="M{x:g} {a:g}V{b:g}"/>']
    there = "L".join(f"{x:g} {b:g}" for x, _, b in points)
    back = "L".join(f"{x:g} {a:g}" for x, a, _ in reversed(points))
    return [f'<path class="band f{index}" d="M{there}L{back}Z"/>']


def _curve(line: Line, index: int, across: Scale, up: Scale) -> list[str]:
    if line.style == "dots":
        dots = [
            f'<circle class="f{index}" cx="{across(s)}" cy="{up(v)}" r="3.4"/>'
            for s, v in zip(line.steps, line.values)
            if math.isfinite(v)
        ]
        return [_path(line.steps, line.values, across, up, f"l{index} thin"), *dots]
    if line.style == "plain" or len(line.values) < 12:  # points; a shorter curve is not smoothed
        return [_path(line.steps, line.values, across, up, f"l{index}")]
    reach = max(2, len(line.values) // 30)  # a smoothed point is the mean over 1/30 of the curve on each side
    smooth = [mean_of_known(line.values[max(0, i - reach) : i + reach + 1]) for i in range(len(line.values))]
    return [
        _path(line.steps, line.values, across, up, f"l{index} raw"),
        _path(line.steps, smooth, across, up, f"l{index}"),
    ]


def _path(steps: Sequence[float], values: Sequence[float], across: Scale, up: Scale, css: str) -> str:
    moves, pen_down = [], False
    for step, value in zip(steps, values):
        if math.isfinite(value):
            moves.append(f"{'L' if pen_down else 'M'}{across(step):g} {up(value):g}")
        pen_down = math.isfinite(value)
    if len(moves) == 1:  # a single point is drawn as a short line, so that it is visible
        moves.append("h3")
    return f'<path class="{css}" d="{"".join(moves)}"/>'


def _by_step(line: Line, steps: Sequence[float], unit: str) -> list[str]:
    texts = {step: number(value, unit) for step, value in zip(line.steps, line.values)}
    return [texts.get(step, "") for step in steps]


def _axes(across: Scale, up: Scale, unit: str, label: str) -> list[str]:
    parts = []
    size, spread = (math.floor(math.log10(v)) for v in (max(-up.low, up.high), up.high - up.low or 1.0))
    digits = max(3, size - spread + 2)  # so that no two ticks have the same text
    at = ticks(up.low, up.high, 5)
    for tick in at:
        y = up(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{number(tick, unit, digits)}</text>')
    for tick in ticks(across.low, across.high, 6):
        if abs(tick - round(tick)) < 1e-9 or label != "step":
            parts.append(f'<text x="{across(tick)}" y="{HEIGHT - 8}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{LEFT - 14}" y="{HEIGHT - 8}" text-anchor="end">{html.escape(label)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    return parts


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values between low and high, approximately `about` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
