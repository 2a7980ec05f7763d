"""Unions of time intervals, against sets of points in time."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshrl.monitor.recorder import ControllerTrace, Phase, RankFacts, Span, Step
from meshrl.tools.diagnose.diagnosis import diagnose
from meshrl.tools.diagnose.measure import Lanes, by_cause, lanes, meetings, phase_time
from meshrl.tools.diagnose.read import Rank, Trace, overlap, total, union, without

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


KINDS = ("phase", "compute", "collective", "copy", "host")
NAMES = st.sampled_from(["rollout", "train", "sync", "eval", "all_gather"])
PART = st.tuples(NAMES, st.sampled_from(KINDS), st.integers(-30, 90), st.integers(0, 40))


@CALM
@given(
    st.dictionaries(st.integers(0, 3), st.lists(PART, min_size=1, max_size=12), min_size=1),
    st.lists(PART, max_size=6),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=4),
    st.none() | st.lists(st.tuples(st.integers(-10, 90), st.integers(0, 20)), max_size=6),
    st.booleans(),
)
def test_the_time_of_each_rank_adds_up_on_any_trace(of_ranks, phases, steps, operations, colocated):
    """Spans that overlap, are nested, equal, empty, or cross the ends of steps; steps with gaps and overlaps."""
    facts = RankFacts(host="", device="cpu", trains=True, samples=colocated)
    inside = None if operations is None else union((a, a + length) for a, length in operations)
    ranks = {
        number: Rank(
            facts=facts,
            spans=[Span(name, kind, a, a + length, {"group": 2}) for name, kind, a, length in parts],
            operations=inside,
        )
        for number, parts in of_ranks.items()
    }
    listed = [Step(i, a, a + length) for i, (a, length) in enumerate(steps, 1)]
    trace = Trace(
        source=Path("t"),
        control=ControllerTrace(
            phases=[Phase(name, a, a + length) for name, _, a, length in phases],
            steps=listed,
            ranks={},
            facts={"schedule": "colocated" if colocated else "fully_async"},
        ),
        steps=listed,
        ranks=ranks,
        clock="",
    )
    wall = total(trace.windows())
    assume(wall > 0)
    found = diagnose(trace)
    for divided in by_cause(trace, {n: lanes(r) for n, r in ranks.items()}, meetings(trace)).values():
        assert sum(map(total, divided.values())) == wall
    for t in found.phases:
        assert t.compute + t.exposed + t.copy + t.host + t.idle == pytest.approx(t.wall, abs=1e-12)
        assert 0 <= t.overlapped <= t.compute + 1e-12
    assert all(cost.seconds >= 0 for cost in found.costs)
    assert sum(cost.seconds for cost in found.costs) == pytest.approx(found.step_s, abs=1e-12)
    assert found.step_s == pytest.approx(wall / 1e9 / len(steps))
