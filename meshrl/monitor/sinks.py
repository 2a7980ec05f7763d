"""Where a step's numbers go: metrics.jsonl for tools, and the terminal for whoever watches.

rich belongs to the tools; the live display of a run is the one place outside them that imports it, and only when the
output is a terminal.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from meshrl.core.types import SCHEMA, Metric
from meshrl.monitor.curve import text_curve
from meshrl.monitor.jsonl import picking, read_lines, to_line
from meshrl.monitor.metrics import divide, merge, units


class Sink(Protocol):
    """Takes the numbers of a step, as `divide` and `units` give them; is closed once, with how the run ended."""

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None: ...

    def close(self, failed: bool = False) -> None: ...


def report(sinks: Sequence[Sink], step: int, metrics: Iterable[Metric]) -> dict[str, float]:
    """Divide, once, and hand the step's numbers to every sink. Returns the numbers."""
    merged = merge(metrics)
    values, names = divide(merged), units(merged)
    for sink in sinks:
        sink.write(step, values, names)
    return values


class JsonlSink:
    """metrics.jsonl: lines {"schema", "step", "time", "metrics"} and, before the first line that needs it, a header
    {"schema", "units"} with the units of names not seen so far. Flushed line by line.

    An existing file is continued. first_step: the step that a resumed run starts with; what an interrupted run wrote
    of it and of later steps is dropped, since those steps are made again.
    """

    def __init__(self, path: str | Path, first_step: int | None = None, clock: Callable[[], float] = time.time):
        self._path, self._clock = Path(path), clock
        self._units: dict[str, str] = {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._keep(first_step)
        self._file = self._path.open("a", encoding="utf-8")

    def _keep(self, first_step: int | None) -> None:
        """Rewrite the file without a torn last line and without the steps that come again; atomically."""
        kept = []
        for number, record in enumerate(read_lines(self._path), start=1):
            with picking(f"{self._path}:{number}", "a line of metrics.jsonl"):
                if "units" in record:
                    self._units.update(record["units"])
                elif first_step is not None and record["step"] >= first_step:
                    continue
                kept.append(to_line(record))
        aside = self._path.with_suffix(".aside")
        aside.write_text("".join(kept), encoding="utf-8")
        os.replace(aside, self._path)

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        """Append one step.

        Raises: ValueError when a name comes with another unit than the file already gives it.
        """
        changed = {n: (self._units[n], u) for n, u in units.items() if self._units.get(n, u) != u}
        if changed:
            raise ValueError(f"{self._path}: units changed (was, is): {changed}; one name has one unit")
        new = {name: unit for name, unit in units.items() if name not in self._units}
        if new:
            self._units.update(new)
            self._file.write(to_line({"schema": SCHEMA, "units": new}))
        line = {"schema": SCHEMA, "step": step, "time": self._clock(), "metrics": dict(values)}
        self._file.write(to_line(line))
        self._file.flush()

    def close(self, failed: bool = False) -> None:
        self._file.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsLine:
    """One step of a metrics.jsonl. time: seconds since 1970."""

    step: int
    time: float
    metrics: dict[str, float]


def read_metrics(path: str | Path) -> tuple[list[MetricsLine], dict[str, str]]:
    """A metrics.jsonl as (lines, units). Raises: DataError naming file and line."""
    lines: list[MetricsLine] = []
    units: dict[str, str] = {}
    for number, record in enumerate(read_lines(path), start=1):
        with picking(f"{path}:{number}", "a line of metrics.jsonl"):
            if "units" in record:
                units |= {str(name): str(unit) for name, unit in record["units"].items()}
                continue
            step, at = record["step"], float(record["time"])
            if type(step) is not int or not -1 <= step < _MAX_STEP or not 0 <= at < _MAX_TIME:
                raise ValueError(f"step {step!r:.40} at time {at!r}")
            values = {name: float(value) for name, value in record["metrics"].items()}
            lines.append(MetricsLine(step=step, time=at, metrics=values))
    return lines, units


_MAX_STEP, _MAX_TIME = 1 << 40, 1e11  # beyond either a number is damage; a time of year 5138


class TerminalSink:
    """A live panel with the curve of the reward (of the loss in SFT) on a terminal; plain lines anywhere else."""

    def __init__(
        self,
        num_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_step: int = 0,
    ):
        self._num_steps, self._first = num_steps, first_step
        self._stream, self._clock = stream or sys.stdout, clock
        self._since, self._done_then = clock(), 0  # where the speed of steps is measured from
        self._measured = False
        self._values: dict[str, float] = {}
        self._curve: list[float] = []
        self._live: Any = None
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False, transient=False)
            self._live.start()

    def note(self, text: str) -> None:
        """A line of text about the run, above the live panel."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        """Show one finished step, or an evaluation after it; one before the first step comes as first_step - 1."""
        self._curve += [values[name] for name in ("reward/mean", "loss/nll") if name in values]
        left_s = self._left(step)
        if self._live is not None:
            self._values.update(values)  # an evaluation alone must not blank the step's numbers
            self._live.update(self._panel(step, self._values, left_s), refresh=True)
        else:
            self.note(step_line(step, self._num_steps, values, left_s))

    def _left(self, step: int) -> float | None:
        """Seconds to the end at the speed so far. Start-up counts until there is something better: the time from the
        first thing written on."""
        now, done = self._clock(), step + 1 - self._first
        past = done - self._done_then
        left_s = (now - self._since) / past * (self._num_steps - step - 1) if past > 0 else None
        if not self._measured:
            self._since, self._done_then, self._measured = now, done, True
        return left_s

    def _panel(self, step: int, values: Mapping[str, float], left_s: float | None) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        shown = [(label, show(values[name])) for label, name, show in COLUMNS if name in values]
        if left_s is not None:
            shown.append(("left", duration(left_s)))
        for i in range(0, len(shown), 4):
            table.add_row(*(Text.assemble((f"{label} ", "dim"), text) for label, text in shown[i : i + 4]))
        bar = Padding(ProgressBar(total=self._num_steps, completed=step + 1))  # a bare bar ends without a newline
        curve = Text(text_curve(self._curve, width=60, height=6))
        return Panel(Group(bar, table, curve), title=f"step {step + 1}/{self._num_steps}", title_align="left")

    def close(self, failed: bool = False) -> None:
        if self._live is not None:
            self._live.stop()


def step_line(step: int, num_steps: int, values: Mapping[str, float], left_s: float | None) -> str:
    """One step as one line; what was not measured is left out. Steps are shown from 1."""
    width = len(str(num_steps))
    parts = [f"step {step + 1:>{width}}/{num_steps}"]
    parts += [f"{label} {show(values[name])}" for label, name, show in COLUMNS if name in values]
    if left_s is not None:
        parts.append(f"left {duration(left_s)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Such as 42s, 3m07s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _amount(value: float) -> str:
    """With k, M, G, T from a thousand on; NaN and infinities as they are."""
    if not math.isfinite(value):
        return str(value)
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f}{letter}"
    return f"{value:.0f}"


def _bytes(value: float) -> str:
    return _amount(value) + "B"


def _speed(value: float) -> str:
    return _amount(value) + " tok/s"


# label, metric, how to show it; in this order
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward/mean", "{:.3f}".format),
    ("eval", "eval/mean_at_k", "{:.3f}".format),
    ("length", "rollout/length_mean_tokens", "{:.1f}".format),
    ("cut", "rollout/truncated_fraction", "{:.1%}".format),
    ("loss", "loss/policy", "{:.4f}".format),
    ("nll", "loss/nll", "{:.4f}".format),
    ("kl", "loss/kl", "{:.2e}".format),
    ("kl-old", "loss/approx_kl", "{:.2e}".format),
    ("entropy", "loss/entropy", "{:.3f}".format),
    ("clip-", "loss/clip_fraction_low", "{:.2%}".format),
    ("clip+", "loss/clip_fraction_high", "{:.2%}".format),
    ("grad", "train/grad_norm", "{:.3g}".format),
    ("lr", "train/lr", "{:.1e}".format),
    ("rollout", "rollout/tokens_per_s", _speed),
    ("train", "train/tokens_per_s", _speed),
    ("sync", "sync/latency_s", "{:.2f}s".format),
    ("mem", "memory/rss_bytes", _bytes),
)
