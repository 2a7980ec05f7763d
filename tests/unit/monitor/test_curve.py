from __future__ import annotations

import pytest

from meshrl.monitor.sinks import text_curve

NAN = float("nan")


def test_a_rising_curve_rises_in_the_terminal():
    assert text_curve([0.0, 0.5, 1.0], width=10, height=2) == "1 │ ▁█\n0 │▁██"


def test_more_values_than_columns_are_averaged():
    lines = text_curve([0.0, 0.0, 1.0, 1.0, 4.0, 4.0], width=3, height=1)
    assert lines == "4 │▁▃█"


def test_a_missing_value_leaves_its_column_empty():
    assert text_curve([1.0, NAN, 2.0], width=3, height=1) == "2 │▁ █"
    assert text_curve([NAN, 1.0, 3.0, NAN], width=2, height=1) == "3 │▁█"


@pytest.mark.parametrize("values", [[], [NAN, NAN]])
def test_a_curve_without_values_is_a_short_text(values):
    assert text_curve(values) == "no values yet"


def test_equal_values_draw_a_flat_line():
    top, bottom = text_curve([0.5] * 3, width=3, height=2).splitlines()
    assert set(top.split("│")[1]) <= {" ", "▁"} and bottom.split("│")[1] == "███"


@pytest.mark.parametrize("num_values", [1, 59, 60, 61, 1000])
def test_the_curve_keeps_its_size(num_values):
    lines = text_curve([float(i % 7) for i in range(num_values)], width=60, height=8).splitlines()
    assert len(lines) == 8
    assert len(lines[-1].split("│")[1]) == min(num_values, 60)
