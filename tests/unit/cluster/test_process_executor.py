"""One process for each rank: answers, failures that name rank and phase, and no process left behind.

An executor calls any module-level function with a RankWorker as its first argument; some below run inside the ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from running_processes import running_descendants
from tiny_engines import ask
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh
from tiny_specs import worker_spec

from meshrl.algo.losses import sft_loss
from meshrl.cluster import processes
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import WorkerSpec, phase
from meshrl.cluster.processes import ProcessExecutor
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import ConfigError, RankFailure, SyncError
from meshrl.core.types import Request, Turn
from meshrl.process.diagnosis import Snapshot

pytestmark = pytest.mark.timeout(300)  # ranks start slowly on a machine that does much else


def _specs(count: int, *, train: bool = False, folder: Path = Path("unused")) -> list[WorkerSpec]:
    """Ranks that train a tiny model, or ranks without engines, which start faster."""
    return [
        worker_spec(
            rank=rank,
            num_train_ranks=count if train else 0,
            num_rollout_ranks=0 if train else count,
            model=ModelConfig(path=str(folder), dtype="float32"),
            train=TrainConfig(activation_checkpointing=False, max_tokens_per_microbatch=40),
            timeout_s=200.0,
        )
        for rank in range(count)
    ]


def _workers() -> list[psutil.Process]:
    return running_descendants(r"meshrl\.cluster\.worker")


def _with(specs: list[WorkerSpec], body: Callable[[ProcessExecutor], Awaitable[None]]) -> None:
    """Start, run the body, close; no process may be left, also after a failure."""

    async def main() -> None:
        executor = ProcessExecutor(specs)
        try:
            await executor.start()
            assert len(_workers()) == len(specs)
            await body(executor)
        finally:
            await executor.close()

    try:
        asyncio.run(main())
    finally:
        assert not _workers()


# ---- functions that run in the ranks


def echo(worker: RankWorker, value: Any) -> tuple[int, int, Any]:
    return worker.spec.rank, os.getpid(), value


def remember(worker: RankWorker, value: int) -> list[int]:
    worker.seen = [*getattr(worker, "seen", []), value]
    return worker.seen


async def meet(worker: RankWorker, mine: int, other: int) -> int:
    """Ends only when the other call has begun: tasks interleave in a rank."""
    worker.here = {*getattr(worker, "here", set()), mine}
    while other not in worker.here:
        await asyncio.sleep(0)
    return mine


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("can't travel")
        self.lock = threading.Lock()


def misbehave(worker: RankWorker, how: str) -> None:
    """Fail in the middle of a phase, in one of several ways."""
    if how == "raise":
        raise KeyError("no such row")
    if how == "unpicklable":
        raise Unpicklable
    if how == "meshrl":
        raise SyncError("version 3 was not sent")
    if how == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)


def meet_or_misbehave(worker: RankWorker, culprit: int, how: str) -> None:
    """A collective that one rank never joins."""
    import torch.distributed as dist

    if worker.spec.rank == culprit:
        misbehave(worker, how)
    dist.barrier()


# ---- tests


def test_answers_come_back_in_order_and_close_ends_even_a_busy_rank(monkeypatch):
    monkeypatch.setattr(processes, "_STOP_GRACE_S", 0.3)

    async def body(executor: ProcessExecutor) -> None:
        both = await asyncio.gather(*(executor.call(rank, echo, {"x": rank}) for rank in (0, 1)))
        assert [(rank, value) for rank, _, value in both] == [(0, {"x": 0}), (1, {"x": 1})]
        assert len({pid for _, pid, _ in both} | {os.getpid()}) == 3
        seen = await asyncio.gather(*(executor.call(0, remember, i) for i in range(20)))
        assert seen[-1] == list(range(20)), "calls of one rank start in the order they were made"
        met = await asyncio.gather(executor.call(0, meet, 1, 2), executor.call(0, meet, 2, 1))
        assert met == [1, 2]
        big = np.random.default_rng(0).standard_normal(300_000)
        answers = await asyncio.gather(*(executor.call(rank, echo, big) for rank in (0, 1, 0, 1)))
        assert all(np.array_equal(value, big) for _, _, value in answers)
        with pytest.raises(SyncError, match="version 3 was not sent") as error:
            await executor.call(1, misbehave, "meshrl")
        assert "in rank 1, phase 'misbehave'" in "".join(error.value.__notes__)
        assert (await executor.call(1, echo, "still there"))[2] == "still there"
        busy = asyncio.ensure_future(executor.call(0, misbehave, "sleep"))
        await asyncio.sleep(0.1)
        busy.cancel()

    _with(_specs(2), body)


FAULTS = {
    "raise": "raised KeyError: 'no such row'",
    "unpicklable": "raised .*can't travel",
    "SIGKILL": "killed by SIGKILL .*memory",
    "SIGSEGV": "killed by SIGSEGV",
    "sleep": r"no answer within cluster\.timeout_s = 3 s, and rank 0 waits for it",
    "SIGSTOP": r"no answer within cluster\.timeout_s = 3 s; its process is stopped",
}


@pytest.mark.parametrize(
    "how",
    [pytest.param(h, marks=pytest.mark.slow) if h in ("unpicklable", "SIGSEGV", "SIGSTOP") else h for h in FAULTS],
)
def test_a_rank_that_fails_in_a_collective_ends_the_run_and_is_named(how, tmp_path):
    """The others wait in the collective for ever; their stacks are reported, they are ended, and later calls raise
    the failure. Rank 0 is called first, so it misses its deadline first; it is not the cause."""
    tiny_qwen2().save_pretrained(tmp_path)

    async def body(executor: ProcessExecutor) -> None:
        if how in ("sleep", "SIGSTOP"):
            executor.specs = [dataclasses.replace(spec, timeout_s=3.0) for spec in executor.specs]
        calls = [asyncio.ensure_future(executor.call(rank, meet_or_misbehave, 1, how)) for rank in (0, 1)]
        _, waiting = await asyncio.wait(calls, timeout=60.0)
        assert not waiting, "a call waits for its deadline, although the failure is known"
        failures = [r for r in await asyncio.gather(*calls, return_exceptions=True) if isinstance(r, RankFailure)]
        assert len(failures) == 2 and failures[0] is failures[1], "all calls raise the same failure"
        (failure, _) = failures
        assert (failure.rank, failure.phase) == (1, "meet_or_misbehave")
        assert re.search(FAULTS[how], failure.cause), failure.cause
        first, *rest = str(failure).splitlines()
        assert first == f"rank 1 failed in phase 'meet_or_misbehave': {failure.cause}"
        assert "rank 0, in phase 'meet_or_misbehave':" in rest
        assert ("in misbehave" in failure.details) == (how in ("raise", "unpicklable", "sleep"))
        assert "thread 0x" in failure.stacks
        if how not in ("SIGKILL", "SIGSEGV"):  # after a death, gloo raises in the other rank
            assert "in barrier" in failure.details and "in meet_or_misbehave" in failure.stacks
        with pytest.raises(RankFailure) as later:
            await executor.call(0, echo, 1)
        assert later.value is failure
        for _ in range(100):
            if not _workers():
                break
            await asyncio.sleep(0.1)
        assert not _workers(), "the failure itself ends all ranks, not only close"

    _with(_specs(2, train=True, folder=tmp_path), body)


def raise_or_die_later(worker: RankWorker) -> None:
    """An exception of a broken collective, which arrives before the death that caused it."""
    if worker.spec.rank == 0:
        raise ConnectionError("Connection closed by peer")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_an_exception_that_another_ranks_death_caused_is_not_reported_as_the_cause(tmp_path, monkeypatch):
    """The first sign is rank 0's exception, but rank 1 is the cause. So new ranks can replace both."""
    monkeypatch.setattr(processes, "_SETTLE_S", 60.0)  # it ends with the death
    tiny_qwen2().save_pretrained(tmp_path)

    async def body(executor: ProcessExecutor) -> None:
        calls = [executor.call(rank, raise_or_die_later) for rank in (0, 1)]
        (failure, _) = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failure, RankFailure) and (failure.rank, failure.kind) == (1, "ended")
        await executor.restart([0, 1])
        assert [(await executor.call(rank, echo, "new"))[2] for rank in (0, 1)] == ["new"] * 2

    _with(_specs(2, train=True, folder=tmp_path), body)


def test_each_sampler_failure_is_diagnosed_separately(monkeypatch):
    """One sleeps, one is stopped and one is killed: each failure has its own cause, and no call waits for ever."""
    monkeypatch.setattr(processes, "_SETTLE_S", 0.5)

    async def body(executor: ProcessExecutor) -> None:
        executor.specs = [dataclasses.replace(spec, timeout_s=3.0) for spec in executor.specs]
        calls = [executor.call(rank, misbehave, how) for rank, how in enumerate(("sleep", "SIGSTOP", "SIGKILL"))]
        failures = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert [(f.rank, f.kind) for f in failures] == [(0, "silent"), (1, "silent"), (2, "ended")]
        assert ["is stopped" in f.cause for f in failures] == [False, True, False]

    _with(_specs(3), body)


def hold(worker: RankWorker, pipe: str) -> None:
    with open(pipe, "wb"):
        time.sleep(600)


async def until(worker: RankWorker, file: str) -> int:
    while not Path(file).exists():
        await asyncio.sleep(0.01)
    return worker.spec.rank


def until_the_end_of(worker: RankWorker, pipe: str) -> int:
    """Blocks until the process that holds the other end of the pipe ends."""
    with open(pipe, "rb") as end:
        end.read()
    return worker.spec.rank


def test_a_rank_that_answers_during_the_diagnosis_is_not_lost(tmp_path):
    """Three ranks miss their deadlines at once. The first is lost. The second answers meanwhile, and gets another
    call of the same phase. The third waits for the first, and answers when that one has been ended."""
    pipe, first, second = (str(tmp_path / name) for name in ("pipe", "first", "second"))
    os.mkfifo(pipe)

    async def body(executor: ProcessExecutor) -> None:
        pids = [(await executor.call(rank, echo, None))[1] for rank in range(3)]
        long_deadlines, take_snapshots = executor.specs, executor._take_snapshots
        executor.specs = [dataclasses.replace(spec, timeout_s=2.0) for spec in long_deadlines]
        methods = ((hold, pipe), (until, first), (until_the_end_of, pipe))
        silent = [asyncio.ensure_future(executor.call(rank, *asked)) for rank, asked in enumerate(methods)]
        second_calls, answering = list[asyncio.Future[int]](), itertools.count(1)

        async def take_long() -> dict[int, Snapshot]:
            """Wait until the next of them has answered."""
            if (rank := next(answering)) == 1:
                while len(executor._suspicions) < 2:
                    await asyncio.sleep(0.01)
                executor.specs = long_deadlines
                second_calls.append(asyncio.ensure_future(executor.call(1, until, second)))
                Path(first).touch()
            await asyncio.wait([silent[min(rank, 2)]], timeout=20)
            return await take_snapshots()

        executor._take_snapshots = take_long
        failure, *answers = await asyncio.gather(*silent, return_exceptions=True)
        assert isinstance(failure, RankFailure) and (failure.rank, failure.kind) == (0, "silent")
        assert answers == [1, 2]
        await executor._diagnosis
        Path(second).touch()
        assert await second_calls[0] == 1
        assert [(await executor.call(rank, echo, None))[1] for rank in (1, 2)] == pids[1:]

    _with(_specs(3), body)


@phase("train")
def train_slowly(worker: RankWorker, num_batches: int) -> None:
    """Pause before the end of each micro-batch."""
    for _ in range(num_batches):
        time.sleep(0.6)
        worker._batch_ended()


@pytest.mark.parametrize("how", ["SIGKILL", "sleep"])
def test_the_loss_of_a_rank_that_only_samples_ends_no_other_rank(how):
    """The other rank's calls continue; calls of the lost rank raise until it is replaced. A rank is not lost while its
    micro-batches end, although its command takes longer than its deadline."""

    async def body(executor: ProcessExecutor) -> None:
        other = asyncio.ensure_future(executor.call(0, meet, 1, 2))
        before = (await executor.call(1, echo, None))[1]
        if how == "sleep":
            executor.specs = [executor.specs[0], dataclasses.replace(executor.specs[1], timeout_s=2.0)]
            await executor.call(1, train_slowly, 5)
        with pytest.raises(RankFailure, match="rank 1 failed in phase 'misbehave'") as failure:
            await executor.call(1, misbehave, how)
        with pytest.raises(RankFailure) as later:
            await executor.call(1, echo, 1)
        assert later.value is failure.value
        executor.specs = _specs(2)
        await executor.restart([1])
        rank, pid, value = await executor.call(1, echo, "new")
        assert (rank, value) == (1, "new") and pid != before
        assert sorted(await asyncio.gather(other, executor.call(0, meet, 2, 1))) == [1, 2]
        assert len(_workers()) == 2

    _with(_specs(2), body)


@phase("rollout")
async def sample_slowly(worker: RankWorker, request: Request, num_steps: int) -> Turn:
    """Sample with a pause before each step; after so many steps the sampler stands still, but other calls are
    answered."""
    engine: Any = worker.sampler
    engine.trust_loaded_weights()
    step, steps = type(engine).step, itertools.count()

    def slow() -> list[tuple[str, Turn]]:
        time.sleep(0.3)
        return step(engine) if next(steps) < num_steps else []

    engine.step = slow
    return await worker.generate(request)


def test_the_deadline_of_an_answer_begins_again_with_each_token(tmp_path):
    """An answer that takes almost twice the deadline is returned; a sampler that stands still misses it."""
    tiny_qwen2().save_pretrained(tmp_path)
    (spec,) = _specs(1, folder=tmp_path)
    spec = dataclasses.replace(spec, rollout=RolloutConfig(), deadlines={"rollout": 2.0})

    async def body(executor: ProcessExecutor) -> None:
        long = ask("long", range(4), max_new_tokens=12, ignore_eos=True)
        turn = await executor.call(0, sample_slowly, long, 12)
        assert len(turn.output_ids) == 12
        with pytest.raises(RankFailure, match="rank 0 failed in phase 'rollout': no answer within") as error:
            await executor.call(0, sample_slowly, dataclasses.replace(long, id="stands still"), 4)
        assert error.value.kind == "silent" and "in slow" in error.value.details

    _with([spec], body)


class Unreadable:
    """Can be pickled but not unpickled, like a function that only the controller can import."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def lock(worker: RankWorker) -> Any:
    return threading.Lock()


@pytest.mark.parametrize(
    ("method", "arguments", "cause"),
    [
        (echo, (threading.Lock(),), "the command could not be sent: TypeError: cannot pickle"),
        (echo, (Unreadable(),), "ended with exit code 1"),
        pytest.param(lock, (), "ended with exit code 1", marks=pytest.mark.slow),
    ],
    ids=["unpicklable argument", "unreadable argument", "unpicklable result"],
)
def test_arguments_and_results_that_can_not_be_pickled_fail_at_once(method, arguments, cause, capfd):
    """No answer would ever come, so waiting for the deadline would waste ten minutes."""

    async def body(executor: ProcessExecutor) -> None:
        asyncio.get_running_loop().set_debug(True)  # a callback from a thread that does not wake the loop raises
        with pytest.raises(RankFailure, match=cause) as error:
            await executor.call(0, method, *arguments)
        assert (error.value.rank, error.value.phase) == (0, method.__name__)

    _with(_specs(1), body)
    assert ("Traceback" in capfd.readouterr().err) == ("exit code" in cause)


def test_a_training_rank_that_raises_is_named_with_its_traceback(tmp_path):
    """On a real model, while the other rank waits for its share of a gradient."""
    tiny_qwen2().save_pretrained(tmp_path)

    async def body(executor: ProcessExecutor) -> None:
        group = TrainGroup(executor)
        samples = weigh(random_samples(0, [9, 12, 5, 7]))
        rows = group.plan_rows(samples)
        report = await group.forward_backward(rows, "policy", sft_loss)
        assert sum(m.weight for m in report.metrics if m.name == "loss/nll") == sum(s.mask.sum() for s in samples)
        assert not (await group.optim_step("policy", 1e-3)).skipped
        samples[rows.batch_plan.rows(1)[0]].old_logprobs = None  # which its neighbours have
        with pytest.raises(RankFailure, match="rank 1 failed in phase 'train': raised ") as error:
            await group.forward_backward(rows, "policy", sft_loss)
        assert "Traceback" in error.value.details and "packing.py" in error.value.details

    _with(_specs(2, train=True, folder=tmp_path), body)


@pytest.mark.slow
def test_a_rank_that_does_not_start_is_named(tmp_path):
    """A MeshrlError in start is raised unchanged, with a note that names the rank."""
    with pytest.raises(ConfigError, match=r"no config\.json") as error:
        _with(_specs(1, train=True, folder=tmp_path), lambda executor: asyncio.sleep(0))
    assert "in rank 0, phase 'load'" in "".join(error.value.__notes__)
