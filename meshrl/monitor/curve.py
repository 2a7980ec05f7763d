"""A curve for the terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


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
