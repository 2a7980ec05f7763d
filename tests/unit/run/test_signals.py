"""P31: when a signal ends a run, and what it does not cut."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tiny_specs import worker_spec

from meshrl.cluster.groups import TrainGroup
from meshrl.cluster.inline import InlineExecutor
from meshrl.run import signals as module
from meshrl.run.signals import Stop


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)


def _trainer() -> TrainGroup:
    return TrainGroup(InlineExecutor([worker_spec()]))


@asynccontextmanager
async def _listening(number: int, has_checkpoint: bool = True) -> AsyncIterator[Stop]:
    """A run that is told to end as soon as it waits."""
    stop = Stop()
    stop.can_fall_back = lambda: has_checkpoint
    with stop.listening():
        asyncio.get_running_loop().call_soon(stop.request, number)
        yield stop


def _how_far(number: int, num_optim_steps: int, has_checkpoint: bool = True) -> tuple[list[str], bool]:
    """What an update of 0.5 s does until the signal has ended it, and whether it leaves the trainer torn."""
    done, stops = list[str](), list[Stop]()

    async def run() -> None:
        trainer = _trainer()
        async with _listening(number, has_checkpoint) as stop:
            stops.append(stop)
            with stop.updating(trainer):
                trainer.num_optim_steps += num_optim_steps
                await asyncio.sleep(0)
                await asyncio.sleep(0.5)
                done.append("update")
            done.append("next")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    return done, not stops[0].trainer_is_valid


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_update_that_has_moved_no_weights_ends_at_once(number):
    """The trainer still is as the last finished step left it."""
    assert _how_far(number, num_optim_steps=0) == ([], False)


def test_an_update_that_has_moved_the_weights_is_ended_first():
    """By SIGTERM always; by Ctrl-C as long as there is no checkpoint to fall back on."""
    assert _how_far(signal.SIGTERM, num_optim_steps=1) == (["update"], False)
    assert _how_far(signal.SIGINT, num_optim_steps=1, has_checkpoint=False) == (["update"], False)


def test_ctrl_c_waits_for_a_long_update_only_so_long():
    """What the trainer holds then is no step's state, and must not be saved."""
    assert _how_far(signal.SIGINT, num_optim_steps=1) == ([], True)


def test_a_save_is_never_cut():
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
    """Whoever saves at the end waits for the ranks, and must not be cut by the same signal again."""
    done = list[str]()

    async def run() -> None:
        trainer, stop = _trainer(), Stop()
        with stop.listening():
            try:
                with stop.updating(trainer):
                    trainer.num_optim_steps += 1
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
