"""Curves and stacked bars as SVG texts. Colours are the page's CSS classes, which have a light and a dark mode."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshrl.monitor.curve import mean_of_known, split
from meshrl.monitor.sinks import duration

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 50, WIDTH - 16, 10, HEIGHT - 24
MAX_POINTS = 240  # if there are more, equal parts are averaged
SMOOTH_FROM = 12  # points; a shorter curve is not smoothed
SMOOTH_SHARE = 30  # a smoothed point is the mean over 1/30 of the curve on each side


Style = Literal["noisy", "plain", "dots", "limit"]
"""noisy: pale, with its moving average. limit: dashed."""


@dataclass(frozen=True, slots=True)
class Line:
    """Non-finite values are gaps."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    style: Style = "plain"


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts a value to its position between two edges of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (self._unlog(v) for v in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)

    def _unlog(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def number(value: float, unit: str = "") -> str:
    """A readable number with three digits: 1.2k, 2e-7, 1.2 GB, 40 ms, 2m07s."""
    if not math.isfinite(value):
        return str(value)
    if unit == "s" and value >= 100:
        return duration(value)
    if unit == "s" and 0 < value < 0.1:
        return f"{value * 1e3:.3g} ms"
    if 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    tail = {"bytes": "B", "s": " s"}.get(unit, "")
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}{tail}" if tail == "B" else f"{value / factor:.3g}{letter}{tail}"
    return f"{value:.3g}{' ' if tail == 'B' else ''}{tail}"


def line_chart(lines: Sequence[Line], unit: str, log: bool = False) -> str:
    """Lines over finished steps, with axes. The element also contains the values, for the page's script.

    log: a logarithmic axis; values of 0 or less are at its lower end.
    """
    drawn = [_thinned(line) for line in lines]
    steps = sorted({s for line in drawn for s in line.steps})
    values = [v for line in drawn for v in line.values if math.isfinite(v) and (v > 0 or not log)]
    if not values:
        return ""
    across = Scale(steps[0], steps[-1], LEFT, RIGHT)
    up = Scale(*_range(values, unit, log), BOTTOM, TOP, log)
    parts = [*_axes(across, up, unit)]
    for index, line in enumerate(drawn):
        parts += _drawn(line, index, across, up)
    data = {
        "steps": steps,
        "lines": [_by_step(line, steps, unit) for line in drawn],
        "x": [across(step) for step in steps],
    }
    return _svg(parts, html.escape(json.dumps(data)))


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
    parts = _axes(Scale(steps[0], steps[-1], (edge(0) + edge(1)) / 2, (edge(count - 1) + edge(count)) / 2), up, "s")
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
    return _svg(parts)


def sparkline(values: Sequence[float]) -> str:
    """A small curve without axes."""
    thin = _thinned(Line("", range(len(values)), values)).values
    known = [v for v in thin if math.isfinite(v)]
    if len(known) < 2:
        return ""
    across, up = Scale(0, len(thin) - 1, 1, 89), Scale(min(known), max(known), 16, 2)
    return f'<svg class="spark" viewBox="0 0 90 18">{_path(range(len(thin)), thin, across, up, "l0")}</svg>'


def _svg(parts: list[str], data: str = "") -> str:
    held = f' data-chart="{data}"' if data else ""
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"{held}>{"".join(parts)}</svg>'


def _thinned(line: Line) -> Line:
    if len(line.values) <= MAX_POINTS or line.style == "dots":
        return line
    means = [mean_of_known(part) for part in split(line.values, MAX_POINTS)]
    return Line(line.label, [part[-1] for part in split(line.steps, MAX_POINTS)], means, line.style)


def _range(values: Sequence[float], unit: str, log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high == 0 or (unit == "fraction" and low >= 0 and 0.5 < high <= 1):
        return 0.0, 1.0
    if log:
        return 10 ** math.floor(math.log10(low) - 0.01), 10 ** math.ceil(math.log10(high) + 0.01)
    if 0 <= low <= 0.6 * high:  # the axis starts at 0, unless the curve would then be almost flat
        return 0.0, high * 1.05
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def _drawn(line: Line, index: int, across: Scale, up: Scale) -> list[str]:
    if line.style == "limit":
        return [_path(line.steps, line.values, across, up, "limit")]
    if line.style == "dots":
        dots = [
            f'<circle class="f{index}" cx="{across(s)}" cy="{up(v)}" r="3.4"/>'
            for s, v in zip(line.steps, line.values)
            if math.isfinite(v)
        ]
        return [_path(line.steps, line.values, across, up, f"l{index} thin"), *dots]
    if line.style == "plain" or len(line.values) < SMOOTH_FROM:
        return [_path(line.steps, line.values, across, up, f"l{index}")]
    reach = max(2, len(line.values) // SMOOTH_SHARE)
    smooth = [mean_of_known(line.values[max(0, i - reach) : i + reach + 1]) for i in range(len(line.values))]
    return [
        _path(line.steps, line.values, across, up, f"l{index} raw"),
        _path(line.steps, smooth, across, up, f"l{index}"),
    ]


def _path(steps: Sequence[int], values: Sequence[float], across: Scale, up: Scale, css: str) -> str:
    moves, pen_down = [], False
    for step, value in zip(steps, values):
        if math.isfinite(value):
            moves.append(f"{'L' if pen_down else 'M'}{across(step):g} {up(value):g}")
        pen_down = math.isfinite(value)
    if len(moves) == 1:  # a single point is drawn as a short line, so that it is visible
        moves.append("h3")
    return f'<path class="{css}" d="{"".join(moves)}"/>'


def _by_step(line: Line, steps: Sequence[int], unit: str) -> list[str]:
    known = {step: number(value, unit) for step, value in zip(line.steps, line.values)}
    return [known.get(step, "") for step in steps]


def _axes(across: Scale, up: Scale, unit: str) -> list[str]:
    parts = []
    for tick in _log_ticks(up) if up.log else ticks(up.low, up.high, 5):
        y = up(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{number(tick, unit)}</text>')
    for tick in ticks(across.low, across.high, 6):
        if abs(tick - round(tick)) < 1e-9:
            parts.append(f'<text x="{across(tick)}" y="{HEIGHT - 8}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{LEFT - 14}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
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


def _log_ticks(up: Scale) -> list[float]:
    low, high = round(math.log10(up.low)), round(math.log10(up.high))
    every = max(1, math.ceil((high - low) / 6))
    return [10.0**power for power in range(low, high + 1, every)]
