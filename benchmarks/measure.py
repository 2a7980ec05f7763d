"""How all benchmarks measure: contenders in turn, ratios with an interval, facts of the machine, a last line of JSON.

A figure that compares two contenders comes from rounds in which both ran, one right after the other, in an order that
is reversed after each round; so other work on the machine affects both alike. Wall time is the time that a user waits.
CPU time (of all threads of the process) is reported too, because it varies less when others use the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
LIBRARIES = ("torch", "triton", "transformers", "numpy", "trl", "accelerate")


@dataclass(frozen=True, slots=True)
class Timing:
    """The duration of one call. cpu_s: of all threads of this process, unless another clock was given."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median over rounds and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def timed(work: Callable[..., Any], *args: Any, cpu_clock: Callable[[], float] = time.process_time) -> Timing:
    """Collect garbage, then run `work` once. cpu_clock: returns the seconds of CPU time used so far."""
    gc.collect()
    cpu, wall = cpu_clock(), time.perf_counter()
    work(*args)
    wall = time.perf_counter() - wall
    return Timing(wall, cpu_clock() - cpu)


def alternate(
    contenders: Mapping[str, Callable[[int], Any]],
    rounds: int,
    warmups: int = 1,
    before_each: Callable[[], None] = lambda: None,
    cpu_clock: Callable[[], float] = time.process_time,
) -> dict[str, list[Timing]]:
    """Time each contender once a round; the order is reversed after each round. Warm-ups are not recorded.

    A contender gets the number of the round, so that all contenders can do the same work in a round; warm-ups have the
    numbers -1, -2, ... before_each: called before each contender, not timed, for example to let the one before end.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in contenders}
    for i in range(-warmups, rounds):
        names = list(contenders)
        for name in names if i % 2 == 0 else names[::-1]:
            before_each()
            took = timed(contenders[name], i, cpu_clock=cpu_clock)
            if i >= 0:
                timings[name].append(took)
    return timings


def paired_ratio(over: Sequence[float], under: Sequence[float], resamples: int = 4000) -> Ratio:
    """The median over rounds of over[i] / under[i], with its 95 % bootstrap interval."""
    return median_interval([a / b for a, b in zip(over, under, strict=True)], resamples)


def median_interval(values: Sequence[float], resamples: int = 4000) -> Ratio:
    """The median and its 95 % bootstrap interval."""
    array = np.asarray(values, np.float64)
    picks = np.random.default_rng(0).integers(0, len(array), (resamples, len(array)))
    low, high = np.quantile(np.median(array[picks], axis=1), [0.025, 0.975])
    return Ratio(float(np.median(array)), float(low), float(high))


def geometric_mean(rows: Sequence[Sequence[float]], resamples: int = 4000) -> Ratio:
    """The geometric mean of the rows' medians, with its 95 % interval (bootstrap over the rounds of each row)."""
    rng = np.random.default_rng(0)
    arrays = [np.asarray(row, np.float64) for row in rows]
    again = [np.median(a[rng.integers(0, len(a), (resamples, len(a)))], axis=1) for a in arrays]
    low, high = np.quantile(np.log(again).mean(axis=0), [0.025, 0.975])
    middle = np.log([np.median(a) for a in arrays]).mean()
    return Ratio(math.exp(middle), math.exp(low), math.exp(high))


def median(values: Sequence[float]) -> float:
    return float(np.median(np.asarray(values, np.float64)))


def machine(threads: int) -> dict[str, Any]:
    """The facts of the machine that a reader needs to judge a figure. Call it before the work: it reads the load."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version for name in LIBRARIES if (version := _version(name))},
        "load_average_before": [round(x, 2) for x in os.getloadavg()],
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class Report:
    """Collects a benchmark's raw samples, figures and bars (required values), writes them and prints the last line."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self._args = name, args
        self._machine = machine(args.threads)
        self._began = time.monotonic()
        self.raw: dict[str, Any] = {}
        self.figures: dict[str, Any] = {}
        self.bars: list[dict[str, Any]] = []
        self.load_before: float = self._machine["load_average_before"][0]
        if self.load_before > 0.5:
            self.print_line(
                f"note: load average {self.load_before} before the start; others use this machine, so trust ratios only"
            )

    def print_line(self, text: str) -> None:
        print(text, flush=True)

    def figure(self, name: str, value: float | Ratio, digits: int = 4) -> float:
        """Record and print a figure. A Ratio also records NAME_low and NAME_high."""
        if isinstance(value, Ratio):
            found = {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            interval = f"(95 %: {value.low:.{digits}g} .. {value.high:.{digits}g})"
            self.print_line(f"{name}: {value.value:.{digits}g}  {interval}")
        else:
            found = {name: float(value)}
            self.print_line(f"{name}: {value:.{digits}g}")
        self.figures.update({n: _rounded(v) for n, v in found.items()})
        return found[name]

    def bar(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Record that a figure must reach a limit. The rounded value is compared, so that the output is consistent."""
        value = _rounded(value)
        limit, sign = (at_least, ">=") if at_least is not None else (at_most, "<=")
        need = f"{sign} {limit:.4g}"
        holds = value >= float(need[3:]) if sign == ">=" else value <= float(need[3:])
        self.bars.append({"name": name, "value": value, "need": need, "holds": holds})
        self.print_line(f"bar {name}: {value:.4g}, need {need}: {'holds' if holds else 'MISSED'}")

    def not_measured(self, name: str, why: str, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Record "not measured" in place of a figure and its bar."""
        need = f">= {at_least:.4g}" if at_least is not None else f"<= {at_most:.4g}"
        self.figures[name] = "not measured"
        self.bars.append({"name": name, "value": "not measured", "need": need, "holds": None})
        self.print_line(f"bar {name}, need {need}: not measured ({why})")

    def add_timings(self, name: str, timings: Mapping[str, Sequence[Timing]]) -> None:
        self.raw[name] = {contender: [asdict(t) for t in found] for contender, found in timings.items()}

    def finish(self, headline: Sequence[str] = ()) -> None:
        """Write NAME_<date>.json and print the last line. headline: figures that the line has at its top level, too."""
        took = round(time.monotonic() - self._began, 1)
        line = {"benchmark": self.name, **{name: self.figures[name] for name in headline}}
        line |= {"figures": self.figures, "bars": self.bars}
        folder = self._args.results or (tempfile.mkdtemp(prefix="benchmark-") if self._args.smoke else RESULTS)
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{self.name}_{time.strftime('%Y%m%d-%H%M%S')}.json"
        # Only the names of folders: their paths are specific to this machine.
        settings = {name: v.name if isinstance(v, Path) else v for name, v in vars(self._args).items()}
        record = {"machine": self._machine, "settings": settings, "took_s": took, **line, "raw": self.raw}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        self.print_line(f"raw samples: {path} (after {took} s)")
        print(json.dumps(line), flush=True)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if math.isfinite(value) else value


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, help="folder that from_pretrained loads; default: random weights, 5 M shape")
    p.add_argument("--rounds", type=int, default=rounds, help=f"rounds of the alternation (default {rounds})")
    p.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    p.add_argument("--results", type=Path, help="folder for the raw samples (default benchmarks/results)")
    p.add_argument("--smoke", action="store_true", help="tiny sizes and two rounds, to test that the script runs")
    return p
