"""The rows that the proof of a sync scores on both sides (P15)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tiny_samples import random_samples

from meshrl.loops.step import _rows_to_probe


def rows(lengths: list[int], max_context_tokens: int) -> list[int]:
    job: Any = SimpleNamespace(task=SimpleNamespace(max_context_tokens=max_context_tokens))
    picked = _rows_to_probe(job, random_samples(0, lengths))
    assert all(s.mask.any() and s.temperature == 1 and len(s.tokens) == len(s.rollout_logprobs) for s in picked)
    return [len(s) for s in picked]


def test_the_shortest_rows_with_trained_tokens_are_picked():
    assert rows([50, 20, -5, 40, 30, 60, 10], 4096) == [10, 20, 30, 40]
    assert rows([1500, 1000, 900], 4096) == [900, 1000]


def test_a_row_that_fills_the_context_is_cut_so_that_a_server_can_score_it():
    assert rows([32, 32], 32) == [31, 31]
    assert rows([-8], 32) == []
