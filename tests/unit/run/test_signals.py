"""The moment at which a signal ends a run, and the blocks that it does not interrupt."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tiny_specs import worker_spec

from meshrl.cluster.inline import InlineExecutor
from meshrl.cluster.train_group import TrainGroup
from meshrl.process.spawn import STOPS
from meshrl.run import signals as module
from meshrl.run.signals import Stop


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)


@dataclass
class _Job:
    """The part of a loop's state that an update changes."""

    trainer: TrainGroup
    step: int = 0


def _job() -> Any:
    return _Job(TrainGroup(InlineExecutor([worker_spec()])))


@asynccontextmanager
async def _listening(number: int) -> AsyncIterator[Stop]:
    """A run that is requested to end as soon as it waits."""
    stop = Stop()
    with stop.listening():
        asyncio.get_running_loop().call_soon(stop.request, number)
        yield stop


def _interrupted(number: int, num_optim_steps: int, has_checkpoint: bool = True) -> tuple[list[str], bool]:
    """The parts of an update of 0.5 s that finish before the signal ends it; whether the trainer is invalid then."""
    done, stops = list[str](), list[Stop]()

    async def run() -> None:
        job = _job()
        async with _listening(number) as stop:
            stops.append(stop)
            with stop.updating(job, lambda: has_checkpoint):
                job.trainer.num_optim_steps += num_optim_steps
                await asyncio.sleep(0)
                await asyncio.sleep(0.5)
                done.append("update")
            done.append("next")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    return done, not stops[0].trainer_is_valid


@pytest.mark.parametrize("number", [signal.SIGINT, *STOPS])
def test_an_update_that_has_not_changed_the_weights_ends_at_once(number):
    """The trainer still has the state of the last finished step."""
    assert _interrupted(number, num_optim_steps=0) == ([], False)


def test_an_update_that_has_changed_the_weights_is_finished_first():
    """With SIGTERM, SIGUSR2 and SIGHUP always; with Ctrl-C only if there is no checkpoint."""
    for number in STOPS:
        assert _interrupted(number, num_optim_steps=1) == (["update"], False)
    assert _interrupted(signal.SIGINT, num_optim_steps=1, has_checkpoint=False) == (["update"], False)


def test_ctrl_c_waits_for_a_long_update_only_for_a_limited_time():
    """The trainer is then in the middle of a step, and this state must not be saved."""
    assert _interrupted(signal.SIGINT, num_optim_steps=1) == ([], True)


def test_a_save_is_never_interrupted():
    done = []

    async def run() -> None:
        async with _listening(signal.SIGINT) as stop:
            with stop.saving():
                await asyncio.sleep(0.3)
                done.append(not stop.trainer_is_valid)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert done == [False]


def test_a_signal_at_the_very_end_of_an_update_ends_the_run_once():
    """The save at the end waits for the ranks, and must not be interrupted by the same signal."""
    done = list[str]()

    async def run() -> None:
        job, stop = _job(), Stop()
        with stop.listening():
            try:
                with stop.updating(job):
                    job.trainer.num_optim_steps += 1
                    await asyncio.sleep(0)
                    os.kill(os.getpid(), signal.SIGTERM)  # after the last wait of the block
                await asyncio.sleep(0.01)
                done.append("next")
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
                done.append("saved")
                raise

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert done == ["saved"]


@pytest.mark.parametrize(
    ("num_optim_steps", "num_steps", "is_valid"), [(0, 0, True), (1, 0, False), (1, 1, True)],
    ids=["before the optimizer step", "after it", "after the step was counted"],
)  # fmt: skip
def test_an_error_in_an_update_leaves_a_state_to_save_unless_it_is_between_two_steps(
    num_optim_steps, num_steps, is_valid
):
    job, stop = _job(), Stop()
    with pytest.raises(ValueError), stop.updating(job):
        job.trainer.num_optim_steps += num_optim_steps
        job.step += num_steps
        raise ValueError("in the update")
    assert stop.trainer_is_valid == is_valid


def test_sighup_stays_ignored_under_nohup():
    """nohup starts the program with SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def run() -> int | None:
        stop = Stop()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        return stop.signal

    try:
        assert asyncio.run(run()) is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
