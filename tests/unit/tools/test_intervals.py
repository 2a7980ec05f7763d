"""Unions of time intervals, against sets of points in time."""

from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshrl.tools.diagnose.intervals import overlap, total, union, without
from meshrl.tools.diagnose.measure import Lanes, phase_time

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a loaded machine
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def points(intervals) -> set[int]:
    return {t for start, end in intervals for t in range(start, end)}


@CALM
@given(SPANS, SPANS)
def test_unions_are_sets_of_moments(a, b):
    both = union(a, b)
    assert points(both) == points(a) | points(b)
    assert all(one[1] < other[0] for one, other in pairwise(both))
    first, second = union(a), union(b)
    assert points(overlap(first, second)) == points(a) & points(b)
    assert points(without(first, second)) == points(a) - points(b)
    assert total(first) == len(points(a))


@CALM
@given(SPANS, SPANS, SPANS, SPANS, SPANS, SPANS)
def test_the_kinds_of_time_add_up_to_the_phase(windows, compute, sampling, collective, copy, command):
    kinds = [union(part) for part in (compute, sampling, collective, copy, command)]
    found = phase_time(0, "train", union(windows), Lanes(*kinds))
    inside, busy = points(windows), points(compute) | points(sampling)
    assert round(found.wall * 1e9) == len(inside)
    assert round((found.compute + found.exposed + found.copy + found.host + found.idle) * 1e9) == len(inside)
    assert round(found.compute * 1e9) == len(inside & busy)
    assert round(found.exposed * 1e9) == len(inside & points(collective) - busy)
    assert round(found.overlapped * 1e9) == len(inside & points(collective) & busy)
    active = union(*kinds[:3])
    by_union = len(inside & busy) + len(inside & points(collective)) - len(inside & points(active))
    assert round(found.overlapped * 1e9) == by_union  # compute + communication - active
