"""Each rank has its own stream of random numbers, which follows from run.seed."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import torch
from tiny_specs import worker_spec

from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.inline import InlineExecutor
from meshrl.core.device import generators_restored

_executors: list[InlineExecutor] = []  # a context that is garbage ends, too
Drawn = tuple[float, float, float]


def _drawn() -> Drawn:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def _drawn_in_rank(spec: WorkerSpec) -> Drawn:
    """In an inline rank without engines."""

    async def run() -> Drawn:
        executor = InlineExecutor([spec])
        _executors.append(executor)
        try:
            await executor.start()
            return _drawn()
        finally:
            await executor.close()

    threads = torch.get_num_threads()
    try:
        return asyncio.run(run())
    finally:
        torch.set_num_threads(threads)


def _of(seed: int, rank: int) -> Drawn:
    return _drawn_in_rank(worker_spec(seed=seed, rank=rank, num_train_ranks=0, num_rollout_ranks=rank + 1))


def test_seed_and_rank_determine_the_numbers_of_all_generators():
    pairs = [(0, 0), (0, 1), (1, 0), (2**70, 3)]
    drawn = [_of(*pair) for pair in pairs]
    assert [_of(*pair) for pair in reversed(pairs)] == drawn[::-1]
    assert all(len(set(of_generator)) == len(pairs) for of_generator in zip(*drawn, strict=True))


def test_an_inline_rank_leaves_the_callers_generators_as_they_were():
    with generators_restored():
        expected = _drawn()
    assert _of(7, 0) != expected
    assert _drawn() == expected
