from __future__ import annotations

import pytest

from meshrl.monitor.sinks import text_curve

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "width", "height", "drawn"),
    [
        ([0.0, 0.5, 1.0], 10, 2, "1 │ ▁█\n0 │▁██"),
        ([0.0, 0.0, 1.0, 1.0, 4.0, 4.0], 3, 1, "4 │▁▃█"),  # columns are means
        ([1.0, NAN, 2.0], 3, 1, "2 │▁ █"),  # a missing value leaves its column empty
        ([NAN, 1.0, 3.0, NAN], 2, 1, "3 │▁█"),
        ([], 60, 8, "no values yet"),
        ([NAN, NAN], 60, 8, "no values yet"),
    ],
)
def test_a_curve_is_drawn_in_columns(values, width, height, drawn):
    assert text_curve(values, width, height) == drawn


def test_equal_values_draw_a_flat_line():
    top, bottom = text_curve([0.5] * 3, width=3, height=2).splitlines()
    assert set(top.split("│")[1]) <= {" ", "▁"} and bottom.split("│")[1] == "███"


@pytest.mark.parametrize("num_values", [1, 59, 60, 61, 1000])
def test_the_curve_keeps_its_size(num_values):
    lines = text_curve([float(i % 7) for i in range(num_values)], width=60, height=8).splitlines()
    assert len(lines) == 8
    assert len(lines[-1].split("│")[1]) == min(num_values, 60)
