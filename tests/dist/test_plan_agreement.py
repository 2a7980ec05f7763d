"""Ranks compare the hash of the batch plan before they compute with it (P25)."""

from __future__ import annotations

import numpy as np
import pytest
from harness import engine_over
from tiny_models import tiny_qwen2
from tiny_samples import random_samples
from tiny_specs import worker_spec

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.row_cache import SentRows
from meshrl.train.batch_plan import make_batch_plan

LENGTHS = [12, 3, 40, 7]


def _forward(rank: int, world: int, budgets: list[int]) -> str:
    worker = RankWorker(worker_spec(rank=rank, num_train_ranks=world))
    worker.engines = {"policy": engine_over(tiny_qwen2(), world)}
    samples = random_samples(0, LENGTHS)
    plan = make_batch_plan(LENGTHS, world, budgets[rank])
    try:
        rows = worker.forward(SentRows().messages(samples, plan)[rank], "policy")
    except ValueError as error:
        return str(error)
    assert all(np.isfinite(row).all() for row in rows.values())
    return f"scored {sorted(rows)}"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_different_plans_stop_before_they_hang(pool, world):
    """P25: an extra micro-batch on one rank would be a collective that no other rank joins."""
    answers = pool.run(_forward, world, [100] * (world - 1) + [5])
    assert all("different batch plans" in a for a in answers), answers
    assert all(a.startswith("scored") for a in pool.run(_forward, world, [100] * world))
