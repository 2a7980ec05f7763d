"""Values of all ranks, without pickle (parallel/exchange.py)."""

from __future__ import annotations

from typing import Any

from meshrl.parallel.exchange import all_gather_json


def _gathered(rank: int, world: int, values: list[Any]) -> list[Any]:
    return all_gather_json(values[rank])


def test_each_rank_gets_the_values_of_all_ranks_in_their_order(pool):
    """Of different lengths and kinds; the last is much longer than the first."""
    values = ["", {"größe": 3, "\udc80": [None, 1.5]}, [], ["x" * 5000, 2**70]]
    assert pool.run(_gathered, 4, values) == [values] * 4


def test_without_a_process_group_there_is_one_value():
    assert all_gather_json([1, "a"]) == [[1, "a"]]
