"""Unions of time intervals: sorted lists of (start, end) that neither touch nor overlap."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[int, int]]


def union(*parts: Iterable[tuple[int, int]]) -> Intervals:
    """The times that are in at least one of these intervals, which may be in any order."""
    merged: Intervals = []
    for start, end in sorted(interval for part in parts for interval in part if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def overlap(a: Intervals, b: Intervals) -> Intervals:
    """The times that are in both unions."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def without(a: Intervals, b: Intervals) -> Intervals:
    """The times of union a that are not in union b."""
    if not a:
        return []
    edges = [a[0][0], *(edge for interval in b for edge in interval), max(a[-1][1], b[-1][1] if b else 0)]
    return overlap(a, union(zip(edges[::2], edges[1::2])))


def total(a: Intervals) -> int:
    """The length of a union."""
    return sum(end - start for start, end in a)
