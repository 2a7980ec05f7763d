"""The outputs for a step's metrics: metrics.jsonl for tools, and the terminal for users.

rich belongs to the tools; the live display of a run is the only other place that imports it, and only when the output
is a terminal.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TextIO, TypeVar, cast

from meshrl.core.errors import OutputError
from meshrl.core.files import CONTINUE_LATER, output_errors, write_text
from meshrl.core.terminal import printable
from meshrl.core.types import SCHEMA, Metric
from meshrl.monitor.failed_writes import FailedWrites, GuardedStream
from meshrl.monitor.jsonl import data_errors, read_lines, to_line
from meshrl.monitor.metrics import divide, merge, units


class Sink(Protocol):
    """An output for the values of each step, as `divide` and `units` return them. Steps count from 1; an evaluation
    has the number of finished steps, 0 before the first one. `close` is called once; failed: how the run ended."""

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None: ...

    def close(self, failed: bool = False) -> None: ...


def report(sinks: Sequence[Sink], step: int, metrics: Iterable[Metric]) -> tuple[dict[str, float], Exception | None]:
    """Compute the step's values, once, and write them to every sink. Returns the values, and the first exception that a
    sink raised: the others get the values, too."""
    merged = merge(metrics)
    values, names = divide(merged), units(merged)
    first = None
    for sink in sinks:
        try:
            sink.write(step, values, names)
        except Exception as error:
            first = first or error
    return values, first


class JsonlSink:
    """metrics.jsonl: lines {"schema", "step", "time", "metrics"} and, before the first line that needs it, a header
    {"schema", "units"} with the units of new names; an evaluation's line also has the identity that `evaluation`
    returns then. Each line is flushed. All methods raise OutputError when the file can't be written, or when it was
    removed or replaced: nothing else has these numbers.

    An existing file is continued. first_step: the first step of a resumed run; lines of this and later steps are
    dropped, because these steps are repeated.
    """

    def __init__(
        self,
        path: str | Path,
        first_step: int | None = None,
        clock: Callable[[], float] = time.time,
        evaluation: Callable[[], Mapping[str, str]] = dict,
    ):
        self._path, self._clock, self._evaluation = Path(path), clock, evaluation
        self._units: dict[str, str] = {}
        with output_errors(self._path, CONTINUE_LATER):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                lines, _, self._units = split_lines(self._path, first_step)
                write_text(self._path, lines)  # without a truncated last line and the steps that are repeated
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        """Append one step. The line may be incomplete after an OutputError; readers and resumed runs ignore it."""
        changed = {n: (self._units[n], u) for n, u in units.items() if self._units.get(n, u) != u}
        if changed:
            raise ValueError(f"{self._path}: units changed (was, is): {changed}; one name has one unit")
        new = {name: unit for name, unit in units.items() if name not in self._units}
        header = to_line({"schema": SCHEMA, "units": new}) if new else ""
        self._units.update(new)
        identity = {"evaluation": dict(self._evaluation())} if "eval/mean_at_k" in values else {}
        line = {"schema": SCHEMA, "step": step, "time": self._clock(), **identity, "metrics": dict(values)}
        with output_errors(self._path, CONTINUE_LATER):
            self._require_same_file()
            self._file.write(header + to_line(line))
            self._file.flush()

    def close(self, failed: bool = False) -> None:
        """failed: the run already reports an error, so those of this file are not raised in its place."""
        with suppress(*(OSError, OutputError) if failed else ()), output_errors(self._path, CONTINUE_LATER):
            try:
                self._require_same_file()
            finally:
                self._file.close()

    def _require_same_file(self) -> None:
        """The open file would accept lines, too, if it had no name any more."""
        try:
            is_same = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise OutputError(
                f"{self._path} was removed or replaced while the run writes it, so the metrics of further steps would "
                "be lost. Continue the run from its last checkpoint with run.resume=auto"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsLine:
    """One step of a metrics.jsonl. time: seconds since 1970. evaluation: identity of an evaluation; {} = unknown."""

    step: int
    time: float
    metrics: dict[str, float]
    evaluation: dict[str, str] = field(default_factory=dict)


def read_metrics(path: str | Path) -> tuple[list[MetricsLine], dict[str, str]]:
    """A metrics.jsonl as (lines, units)."""
    units: dict[str, str] = {}
    return list(metrics_lines(path, units)), units


def metrics_lines(path: str | Path, units: dict[str, str], containing: str = "") -> Iterator[MetricsLine]:
    """The lines of a metrics.jsonl that contain this text; `units` gets the units of the metrics."""
    for number, record in enumerate(read_lines(path, containing.encode()), start=1):
        with data_errors(str(path) if containing else f"{path}:{number}", "a line of metrics.jsonl"):
            if "units" in record:
                units |= {str(name): str(unit) for name, unit in record["units"].items()}
                continue
            step, at = record["step"], float(record["time"])
            if type(step) is not int or not 0 <= step < _MAX_STEP or not 0 <= at < _MAX_TIME:
                raise ValueError(f"step {step!r:.40} at time {at!r}")
            values = {name: float(value) for name, value in record["metrics"].items()}
            identity = {str(part): str(digest) for part, digest in record.get("evaluation", {}).items()}
            line = MetricsLine(step=step, time=at, metrics=values, evaluation=identity)
        yield line


def split_lines(path: Path, first_step: int | None) -> tuple[str, str, dict[str, str]]:
    """The complete lines of a metrics.jsonl before step `first_step`, those of this and later steps ("" if there are
    none), both with all units, and the units. None = all lines are before it."""
    before, later, units, has_later = list[str](), list[str](), dict[str, str](), False
    for number, record in enumerate(read_lines(path), start=1):
        with data_errors(f"{path}:{number}", "a line of metrics.jsonl"):
            is_header, line = "units" in record, to_line(record)
            is_later = not is_header and first_step is not None and record["step"] >= first_step
            if is_header:
                units.update(record["units"])
            if not is_later:
                before.append(line)
            if is_later or is_header:
                later.append(line)
            has_later = has_later or is_later
    return "".join(before), "".join(later) if has_later else "", units


_MAX_STEP, _MAX_TIME = 1 << 40, 1e11  # a larger number means a damaged file; the time is in the year 5138


class TerminalSink:
    """On a terminal, a live panel with the curve of the reward (in SFT: of the loss).

    If the output is not a terminal, it prints a line for each 1 % of the steps (10 % of the answers of `meshrl eval`),
    for the first and the last step, and for a finished step when the last line is 10 s old. An evaluation within a run
    has no line here, because the loop prints its result as a note; notes are always printed.

    A terminal that is gone, and a closed or full stream, end neither the run nor the panel's thread. writes: counts
    these failures; by default the sink has its own counter. counted: the word for what num_steps counts.
    """

    def __init__(
        self,
        num_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        finished_steps: int = 0,
        writes: FailedWrites | None = None,
        counted: str = "step",
    ):
        self._num_steps, self._first, self._step = num_steps, finished_steps, finished_steps
        self._counted = counted
        self._stream, self._clock = GuardedStream(stream or sys.stdout, writes or FailedWrites()), clock
        self._first_write: tuple[float, int] | None = None  # time and finished steps, to measure steps per second
        self._eta_s: float | None = None
        self._phase, self._progress = "start", ""
        self._values: dict[str, float] = {}
        self._curve: dict[int, float] = {}  # by step
        self._printed_part, self._printed_at, self._noted_at = -1, 0.0, clock()
        self._skipped: str | None = None  # the line of the newest step, while it is not printed
        self._live: Any = None
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=cast(IO[str], self._stream))
            self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=_REFRESHES_PER_S)
            self._live.start()

    def note(self, text: str) -> None:
        """Print a line of text about the run, above the live panel; its control characters are escaped."""
        if self._live is not None:
            self._live.console.print(printable(text), markup=False, highlight=False, emoji=False)
        else:
            self._noted_at = self._clock()
            self._stream.write(printable(text) + "\n")

    def entered(self, phase: str) -> None:
        """Show the phase that the run has entered; "" = between two phases, when the panel still shows the last one."""
        self._phase = phase or self._phase
        self.progress("")

    def progress(self, text: str) -> None:
        """Show how far the phase is, such as 12 of 64 answers. If the output is not a terminal, it prints a line when
        nothing was printed for a minute."""
        self._progress = text
        if self._live is None and self._clock() - self._noted_at >= _SILENCE_S and self._phase != "start":
            self.note(f"{self._counted} {min(self._step + 1, self._num_steps)}/{self._num_steps}: {self._phase_text()}")

    def _phase_text(self) -> str:
        return f"{self._phase}, {self._progress}" if self._progress else self._phase

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        """Show one finished step, or an evaluation after it."""
        now = self._clock()
        if step < self._step:  # the run continues from an earlier step, so its speed is measured from there
            self._first, self._first_write = step, None
        # The speed is measured since the first write: the start-up takes longer than a step.
        done = step - self._first
        self._first_write = self._first_write or (now, done)
        since, before = self._first_write
        left = self._num_steps - step
        self._step, self._eta_s = step, (now - since) / (done - before) * left if done > before else None
        for name in ("reward/mean", "loss/nll"):
            if name in values:
                self._curve = {at: score for at, score in self._curve.items() if at < step} | {step: values[name]}
        self._values = self._values | dict(values)  # an evaluation alone must not blank the step's numbers
        if self._live is None and all(name.split("/")[0] != "eval" for name in values):
            line = step_line(step, self._num_steps, values, self._eta_s, self._counted)
            part = (10 if self._counted == "answer" else 100) * step // self._num_steps
            if part == self._printed_part and now - self._printed_at < _PRINT_EVERY_S:
                self._skipped = line
                return
            self._skipped, self._printed_part, self._printed_at = None, part, now
            self.note(line)

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        values, done = self._values, self._step
        shown = [("phase", self._phase_text())]
        if self._eta_s is not None:
            shown.append(("ETA", duration(self._eta_s)))
        terms = [name for name in values if name.startswith("reward/term/")]
        shown += [(name.partition("/")[2], f"{values[name]:.3f}") for name in terms]
        shown += [(label, show(values[name])) for label, name, show in COLUMNS if name in values]
        table = Table.grid(padding=(0, 2))
        for i in range(0, len(shown), 4):
            cells = ((f"{printable(label)} ", text) for label, text in shown[i : i + 4])
            table.add_row(*(Text.assemble((label, "dim"), text) for label, text in cells))
        bar = Padding(ProgressBar(total=self._num_steps, completed=done))  # a bare bar ends without a newline
        curve = Text(text_curve(list(self._curve.values()), width=60, height=6))
        return Panel(Group(bar, table, curve), title=f"{self._counted} {done}/{self._num_steps}", title_align="left")

    def close(self, failed: bool = False) -> None:
        if self._live is not None:
            self._phase = "failed" if failed else "done"
            self._live.stop()  # shows the panel once more
        elif self._skipped is not None:  # the line of the last step, if the run ends early
            self.note(self._skipped)


def step_line(
    step: int, num_steps: int, values: Mapping[str, float], eta_s: float | None, counted: str = "step"
) -> str:
    """One step as one line of about 120 characters, without missing metrics and without clip fractions of exactly 0
    (the only value with one update per step)."""
    width = len(str(num_steps))
    parts = [f"{counted} {step:>{width}}/{num_steps}"]
    mean = "mean " if counted == "answer" else ""  # of the answers so far, else of this step
    for label, name, show in LINE_COLUMNS:
        if name in values and (values[name] != 0 or not label.startswith("clip")):
            parts.append(f"{mean}{label} {show(values[name])}")
    if eta_s is not None:
        parts.append(f"ETA {duration(eta_s)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Such as 42s, 3m07s, 2h05m."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"


def number(value: float, unit: str = "", digits: int = 3) -> str:
    """A readable number with so many digits: 1.2k, 2e-7, 1.2 GB, 40 ms, 2m07s."""
    if not math.isfinite(value):
        return str(value)
    if unit == "s" and value >= 100:
        return duration(value)
    if unit == "s" and 0 < value < 0.1:
        return f"{value * 1e3:.{digits}g} ms"
    if 0 < abs(value) < 1e-3:
        shown, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(shown):g}e{int(power)}"
    value = float(f"{value:.{digits}g}")  # so that 999.7 becomes 1k
    tail = {"bytes": "B", "s": " s"}.get(unit, "")
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g}{' ' if tail == 'B' else ''}{letter}{tail}"
    return f"{value:.{digits}g}{' ' if tail == 'B' else ''}{tail}"


_PRINT_EVERY_S = 10.0
_SILENCE_S = 60.0
_REFRESHES_PER_S = 4  # of the live panel; phases of overlapping schedules change much more often

Column = tuple[str, str, Callable[[float], str]]
"""Label, metric, format."""

# In the order of display.
LINE_COLUMNS: tuple[Column, ...] = (
    ("reward", "reward/mean", "{:.3f}".format),
    ("length", "rollout/length_mean_tokens", "{:.1f}".format),
    ("truncated", "rollout/truncated_fraction", "{:.1%}".format),
    ("nll", "loss/nll", "{:.4f}".format),
    ("entropy", "loss/entropy", "{:.3f}".format),
    ("kl", "loss/kl", "{:.2e}".format),
    ("clip_low", "loss/clip_fraction_low", "{:.2%}".format),
    ("clip_high", "loss/clip_fraction_high", "{:.2%}".format),
    ("grad", "train/grad_norm", "{:.3g}".format),
)
COLUMNS: tuple[Column, ...] = (  # of the live panel
    *LINE_COLUMNS,
    ("eval", "eval/mean_at_k", "{:.3f}".format),
    ("loss", "loss/policy", "{:.4f}".format),
    ("approx_kl", "loss/approx_kl", "{:.2e}".format),
    ("lr", "train/lr", "{:.1e}".format),
    ("rollout", "rollout/tokens_per_s", lambda value: f"{number(value)} tok/s"),
    ("train", "train/tokens_per_s", lambda value: f"{number(value)} tok/s"),
    ("sync", "sync/latency_s", "{:.2f}s".format),
    ("train idle", "run/train_idle", "{:.0%}".format),
    ("rollout idle", "run/rollout_idle", "{:.0%}".format),
    ("staleness", "rollout/staleness_versions/p95", "{:.0f}".format),
    ("mem", "memory/rss_bytes", lambda value: number(value, "bytes")),
)


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
