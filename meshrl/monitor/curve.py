"""A reward curve for the terminal and as a PNG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_SMOOTH = 0.8  # weight of the past in the moving average: about the last five steps


def text_curve(values: Sequence[float], width: int = 60, height: int = 8) -> str:
    """A bar chart of block characters, with the lowest and highest value at its left; width and height in characters.

    If there are more values than columns, each column is the mean of equally many. NaN counts as no value; a column
    without values is empty.
    """
    columns = [mean_of_known(part) for part in split(values, width)]
    numbers = [c for c in columns if not math.isnan(c)]
    if not numbers:
        return "no values yet"
    low, high = min(numbers), max(numbers)
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"] if height > 1 else [f"{high:.3g}"]
    margin = max(len(label) for label in labels)
    # The lowest value still draws one eighth, so that it differs from no value.
    shares = [(c - low) / (high - low) if high > low else 0.5 for c in columns]
    eighths = [0 if math.isnan(c) else 1 + round(share * (8 * height - 1)) for c, share in zip(columns, shares)]
    lines = []
    for row in range(height):
        base = 8 * (height - 1 - row)
        bars = "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, e - base))] for e in eighths)
        lines.append(f"{labels[row]:>{margin}} │{bars}".rstrip())
    return "\n".join(lines)


def split(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """The values in this number of parts of almost equal length; each alone if there are not more values than parts."""
    parts = min(parts, len(values))
    cuts = [len(values) * i // parts for i in range(parts + 1)] if parts else []
    return [values[a:b] for a, b in itertools.pairwise(cuts)]


def mean_of_known(values: Sequence[float]) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def save_curve(path: Path, rewards: Sequence[float], evals: Sequence[tuple[int, float]]) -> None:
    """Draw the training reward of each step from the first one (thin), its moving average (thick) and evaluations
    (dots; finished steps, score) as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    axes = figure.add_axes((0.14, 0.13, 0.83, 0.78))  # a layout that fits the labels would double the time
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="training, each step")
    axes.plot(steps, moving_average(rewards), color="tab:blue", linewidth=2, label="training, moving average")
    if evals:
        axes.plot([s for s, _ in evals], [v for _, v in evals], "o", color="tab:orange", label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_title("reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")


def moving_average(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start; steps without a value repeat the last average."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total, weight = _SMOOTH * total + value, _SMOOTH * weight + 1.0
        out.append(total / weight if weight else math.nan)
    return out
