from __future__ import annotations

import math

import numpy as np
import pytest

from meshrl.core.types import Metric
from meshrl.monitor.metrics import divide, histogram, merge, units


def parts_of(values, cuts):
    """The same ten values as metrics of each kind, split at the cuts."""
    metrics = []
    for part in np.split(np.asarray(values, float), cuts):
        if not len(part):
            continue
        metrics += [
            Metric(name="mean", sum=float(part.sum()), weight=float(len(part)), unit="nats"),
            Metric(name="sum", sum=float(part.sum()), weight=float(len(part)), reduce="sum", unit="tokens"),
            Metric(name="max", sum=float(part.max()), reduce="max", unit="tokens"),
            Metric(name="min", sum=float(part.min()), reduce="min", unit="tokens"),
            histogram("hist", part, "tokens"),
        ]
    return metrics


@pytest.mark.parametrize("cuts", [[], [5], [1], [1, 2, 3], [9], list(range(1, 10))])
def test_numbers_do_not_depend_on_how_the_parts_were_split(cuts):
    """Means of means would be 4.5 only for an even split."""
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 9.0]
    numbers = divide(merge(parts_of(values, cuts)))
    assert numbers == pytest.approx(
        {"mean": 4.5, "sum": 45.0, "max": 9.0, "min": 1.0, "hist/p05": 1.0, "hist/p50": 4.0, "hist/p95": 9.0}
    )


def test_merging_what_was_merged_changes_nothing():
    metrics = parts_of(range(10), [2, 7])
    once = divide(merge(metrics))
    twice = divide(merge([*merge(metrics[:4]).values(), *merge(metrics[4:]).values()]))
    assert once == pytest.approx(twice)


def test_a_mean_over_nothing_is_nan_and_not_zero():
    numbers = divide(merge([Metric(name="m", sum=0.0, weight=0.0), histogram("h", np.zeros(0), "tokens")]))
    assert math.isnan(numbers["m"]) and math.isnan(numbers["h/p50"])


def test_a_nan_stays_visible_in_every_reduction():
    for reduce in ("mean", "sum", "max", "min"):
        for values in ((float("nan"), 1.0), (1.0, float("nan"))):
            merged = merge([Metric(name="m", sum=v, reduce=reduce) for v in values])
            assert math.isnan(divide(merged)["m"]), (reduce, values)


@pytest.mark.parametrize("changes", [{"unit": "s"}, {"reduce": "sum"}])
def test_one_name_with_two_meanings_is_an_error(changes):
    facts = {"name": "m", "sum": 1.0, "unit": "tokens"}
    with pytest.raises(ValueError, match="'m' is reported as mean in 'tokens' and as"):
        merge([Metric(**facts), Metric(**{**facts, **changes})])


def test_every_number_has_its_unit():
    merged = merge(parts_of(range(10), []))
    assert units(merged).keys() == divide(merged).keys()
    assert units(merged)["hist/p95"] == "tokens" and units(merged)["mean"] == "nats"


def test_numbers_are_plain_floats_for_any_input_type():
    merged = merge([Metric(name="m", sum=np.float32(3), weight=np.float32(2)), histogram("h", np.arange(3), "")])
    assert {type(v) for v in divide(merged).values()} == {float}
