"""What is known about ranks that do not answer: their last collectives, and which of them is the cause."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from tiny_specs import worker_spec

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.processes import ProcessExecutor, RankConnection, _Call, _Suspicion, serve_recorder
from meshrl.core.errors import RankFailure
from meshrl.process.diagnosis import Snapshot, last_collective


def _waits(rank: int, world: int) -> str:
    """Rank 1 waits in a collective until rank 0 has read its records. Returns what rank 0 has read."""
    store, numbers = dist.distributed_c10d._get_default_store(), torch.ones(3, 5)
    if rank == 1:
        worker = RankWorker(worker_spec())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MESHRL_DEVICE", "xpu")
            store.set("socket", serve_recorder(worker))
        dist.all_reduce(numbers)
        dist.broadcast(numbers, 0)
        return ""
    dist.all_reduce(numbers)
    path, text, until = store.get("socket").decode(), "", time.monotonic() + 60
    while "broadcast" not in text and time.monotonic() < until:
        text = last_collective(path)
    dist.broadcast(numbers, 0)
    return text


def test_a_rank_that_waits_in_a_collective_reports_it(pool: RankPool):
    """With no variable set, and while its only Python thread is blocked."""
    text, _ = pool.run(_waits, 2)
    assert text == "gloo:broadcast, number 2 of group default_pg, of [[3, 5]], scheduled"


@pytest.mark.parametrize("num_train_ranks", [0, 1])
def test_ranks_that_train_on_an_accelerator_serve_their_records(monkeypatch: pytest.MonkeyPatch, num_train_ranks: int):
    """On a CPU, the stacks show which ranks wait."""
    worker = RankWorker(worker_spec(num_train_ranks=num_train_ranks, num_rollout_ranks=1 - num_train_ranks))
    assert serve_recorder(worker) == "" and worker.recorder is None
    monkeypatch.setenv("MESHRL_DEVICE", "xpu")
    path = serve_recorder(worker)
    assert bool(path) == bool(num_train_ranks)
    if path:
        assert not last_collective(path).startswith("not known")


class OnAnAccelerator:
    """The process of a rank which reads a number from its device."""

    place = ""

    def __init__(self, number: int):
        self.number = number

    def ending(self, timeout_s: float = 0.0) -> None:
        return None

    def snapshot(self, recorder: str = "") -> Snapshot:
        assert recorder == f"records of {self.number}"
        stacks = 'Current thread 0x01 (most recent call first):\n  File "/meshrl/train/engine.py", line 1 in optim_step'
        return Snapshot(stacks=stacks, collective=f"nccl:_all_gather_base, number {self.number}")

    def kill(self) -> None: ...


def test_a_missed_deadline_on_accelerators_shows_the_last_collective_of_each_rank():
    async def failure() -> RankFailure:
        executor, failures = ProcessExecutor([worker_spec(rank=r, num_train_ranks=2) for r in (0, 1)]), list[Any]()
        executor._loop, executor._on_lost = asyncio.get_running_loop(), failures.append
        for r in (0, 1):
            ours, theirs = socket.socketpair()
            process: Any = OnAnAccelerator(7 + r)
            rank = executor._ranks[r] = RankConnection(r, process, ours, recorder=f"records of {7 + r}")
            rank.pending[0] = _Call("optim", executor._loop.create_future(), True)
            theirs.close()
        call = executor._ranks[1].pending[0]
        await executor._handle(_Suspicion(executor._ranks[1], "optim", "silent", "no answer within 5 s", call=call))
        for connection in executor._ranks.values():
            assert connection.pending[0].future.exception() is failures[0]
        return failures[0]

    failed = asyncio.run(failure())
    assert failed.cause.startswith("no answer within 5 s; which rank is the cause can't be determined")
    for r in (0, 1):
        place = f"rank {r}, in phase 'optim':\n  last collective: nccl:_all_gather_base, number {7 + r}\n"
        assert f"{place}  File " in failed.details and f"{place}Current thread" in failed.stacks
