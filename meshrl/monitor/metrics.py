"""From lists of Metrics to numbers. Merging metrics adds sums and weights; only `divide` divides. And the resident
memory of a run's processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from meshrl.core.lookup import similar_names
from meshrl.core.types import Metric
from meshrl.process.diagnosis import family


class NamedValues(dict[str, Any]):
    """Values by the name of a metric. The KeyError for an unknown name has the nearest names."""

    def __missing__(self, name: str) -> Any:
        inside = sorted((e for e in self if e.startswith(f"{name}/")), key=lambda e: (not e.endswith("/mean"), len(e)))
        near = ", ".join(map(repr, [*inside, *similar_names(str(name), self)][:3]))
        raise KeyError(f"no metric {name!r}" + (f"; did you mean {near}?" if near else ""))


_QUANTILES = {"p05": 0.05, "p50": 0.50, "p95": 0.95}


def merge(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """One Metric for each name, in order of first appearance. The result does not depend on how the parts were split,
    except for rounding.

    mean and sum are added, max and min return the extreme (NaN if any value is), hist adds the counts of equal values.
    """
    merged: dict[str, Metric] = {}
    for metric in metrics:
        a, b = merged.get(metric.name), metric
        if a is None:
            merged[b.name] = b
        elif (a.unit, a.reduce) != (b.unit, b.reduce):
            raise ValueError(
                f"metric {a.name!r} is reported as {a.reduce} in {a.unit!r} and as {b.reduce} in {b.unit!r}; "
                "one name has one unit and one reduction"
            )
        elif a.reduce == "hist":
            parts = (np.concatenate(part) for part in ((a.sum, b.sum), (a.weight, b.weight)))
            merged[b.name] = _histogram(a.name, a.unit, *parts)
        else:
            add = {"max": np.maximum, "min": np.minimum}.get(a.reduce, np.add)
            total = float(add(a.sum, b.sum))
            merged[b.name] = Metric(name=a.name, sum=total, weight=a.weight + b.weight, reduce=a.reduce, unit=a.unit)
    return merged


def histogram(name: str, values: np.ndarray, unit: str) -> Metric:
    """A distribution as a Metric: each distinct value with its count. For lengths and rewards, not for logits."""
    flat = np.asarray(values, np.float64).ravel()
    return _histogram(name, unit, flat, np.ones_like(flat))


def _histogram(name: str, unit: str, values: np.ndarray, counts: np.ndarray) -> Metric:
    distinct, place = np.unique(values, return_inverse=True)
    totals = np.bincount(place, counts, minlength=len(distinct))
    columns = tuple(distinct.tolist()), tuple(totals.tolist())
    return Metric(name=name, sum=columns[0], weight=columns[1], reduce="hist", unit=unit)  # type: ignore[arg-type]


def divide(merged: Mapping[str, Metric]) -> dict[str, float]:
    """The values to report. A mean over nothing is NaN; a hist becomes NAME/p05, NAME/p50 and NAME/p95."""
    return {name: value for metric in merged.values() for name, value in _numbers(metric)}


def units(merged: Mapping[str, Metric]) -> dict[str, str]:
    """The unit of each name that `divide` returns."""
    return {name: metric.unit for metric in merged.values() for name, _ in _numbers(metric)}


def _numbers(metric: Metric) -> Iterator[tuple[str, float]]:
    if metric.reduce == "hist":
        values, counts = np.asarray(metric.sum), np.asarray(metric.weight)
        reached = np.cumsum(counts)
        for suffix, q in _QUANTILES.items():
            at = int(np.searchsorted(reached, q * reached[-1])) if len(values) else 0
            yield f"{metric.name}/{suffix}", float(values[at]) if len(values) else float("nan")
    elif metric.reduce == "mean":
        yield metric.name, float(metric.sum / metric.weight) if metric.weight else float("nan")
    else:
        yield metric.name, float(metric.sum)


def memory_metrics(own_name: str = "controller") -> list[Metric]:
    """`memory/rss_bytes`: this process and all its descendants. `memory/rss_bytes/<name>`: the processes of one name.
    This process has the name own_name; the others have the name rank_<number>, reward, fork_server or other.

    Pages that processes share (libraries, weights in shared memory) count in each of them. Of several calls in one
    step, the largest value is reported.
    """
    by_name: dict[str, int] = {}
    for process in family(os.getpid()):
        name = own_name if process.pid == os.getpid() else process.name
        by_name[name] = by_name.get(name, 0) + process.rss_bytes
    sizes = {"memory/rss_bytes": sum(by_name.values())} | {f"memory/rss_bytes/{n}": b for n, b in by_name.items()}
    return [Metric(name=name, sum=float(size), reduce="max", unit="bytes") for name, size in sizes.items()]
