"""What ends a wait for ranks, and when a lost sampler is replaced. No processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest
from tiny_specs import worker_spec

from meshrl.cluster.launch import Groups
from meshrl.cluster.sampler_group import Replacement
from meshrl.config.rollout import RolloutConfig
from meshrl.core.errors import RankFailure, SyncError

OF_A_TRAINER, LATER = (RankFailure(0, "train", cause, kind="ended") for cause in ("killed", "killed later"))


class Ranks:
    """The executor of one train rank and one sampler, in which only the sampler can be replaced."""

    def __init__(self) -> None:
        self.specs = [worker_spec(rank=rank, num_rollout_ranks=1, rollout=RolloutConfig()) for rank in range(2)]
        self.failure: RankFailure | None = None
        self.num_started = 0
        self.fails: list[RankFailure] = []  # of the next starts

    def lose(self) -> RankFailure:
        self.failure = RankFailure(1, "rollout", "killed", kind="ended")
        return self.failure

    def failure_of(self, rank: int) -> RankFailure | None:
        return self.failure

    async def restart(self, ranks: Sequence[int]) -> None:
        self.failure = None
        await asyncio.sleep(0)
        if self.fails:
            self.failure = self.fails.pop()
            raise self.failure
        self.num_started += 1


def outcome(scenario: Callable[[Groups], Coroutine[Any, Any, Any]]) -> Any:
    """The result or the error of a scenario."""

    async def run() -> Any:
        executor: Any = Ranks()
        return await asyncio.wait_for(scenario(Groups(None, None, executor)), 20)

    try:
        return asyncio.run(run())
    except (Exception, asyncio.CancelledError) as error:
        return error


def soon(action: Callable[[], Any]) -> None:
    asyncio.get_running_loop().call_later(0.01, action)


async def ended(cleanup: list[str], error: Exception | None = None) -> None:
    """Work that never ends by itself. error: raised at its end."""
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.05)
        cleanup.append("ended")
        if error is not None:
            raise error


def test_a_failure_is_raised_when_the_work_has_ended():
    """The first of two, and the work is interrupted once."""

    async def scenario(groups: Groups) -> None:
        soon(lambda: groups.lost(OF_A_TRAINER))
        soon(lambda: groups.lost(LATER))
        await groups.until_failure(ended(cleanup))

    cleanup = list[str]()
    assert outcome(scenario) is OF_A_TRAINER and cleanup == ["ended"]


@pytest.mark.parametrize("first", ["signal", "failure"])
def test_a_signal_waits_for_the_end_of_the_work_and_interrupts_it_once(first):
    async def scenario(groups: Groups) -> None:
        task = asyncio.current_task()
        assert task is not None
        if first == "failure":
            soon(lambda: groups.lost(OF_A_TRAINER))
        asyncio.get_running_loop().call_later(0.03, task.cancel)
        await groups.until_failure(ended(cleanup))

    cleanup = list[str]()
    assert isinstance(outcome(scenario), asyncio.CancelledError) and cleanup == ["ended"]


@pytest.mark.parametrize("by", ["signal", "failure"])
def test_an_error_of_the_work_is_not_hidden_by_what_has_interrupted_it(by):
    """A run that ends with an error saves its last step and reports the error."""
    error, cleanup = ValueError("of the work"), list[str]()

    async def scenario(groups: Groups) -> None:
        task = asyncio.current_task()
        assert task is not None
        soon(task.cancel if by == "signal" else lambda: groups.lost(OF_A_TRAINER))
        await groups.until_failure(ended(cleanup, error))

    assert outcome(scenario) is error


def test_an_error_in_the_tick_of_a_signal_is_raised():
    async def scenario(groups: Groups) -> None:
        task = asyncio.current_task()
        assert task is not None

        async def work() -> None:
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(task.cancel)
            raise ValueError("of the work")

        await groups.until_failure(work())

    assert isinstance(outcome(scenario), ValueError)


def test_a_failure_between_two_waits_ends_the_second_one_and_each_failure_ends_one():
    async def scenario(groups: Groups) -> list[Any]:
        results = list[Any]()
        for failure in (OF_A_TRAINER, LATER):
            groups.lost(failure)
            try:
                await groups.until_failure(ended(list[str]()))
            except RankFailure as error:
                results.append(error)
        return [*results, await groups.until_failure(asyncio.sleep(0, "result"))]

    assert outcome(scenario) == [OF_A_TRAINER, LATER, "result"]


# ---- replacements


def replaced(scenario: Callable[[Replacement, Ranks], Coroutine[Any, Any, None]], max_restarts: int = 9) -> None:
    async def run() -> None:
        ranks: Any = Ranks()
        replacement = Replacement(ranks, max_restarts)
        replacement.note = lambda text: None
        await asyncio.wait_for(scenario(replacement, ranks), 20)

    asyncio.run(run())


def test_a_rank_that_a_sync_has_replaced_is_not_replaced_again():
    async def scenario(replacement: Replacement, ranks: Ranks) -> None:
        async with replacement.lock:  # by the sync
            failure = ranks.lose()
            task = replacement.start(failure)
            await replacement.restart(failure)
            assert replacement.running(1) is task, "no request is sent to a rank without weights"
        await task
        assert ranks.num_started == replacement.num_restarts == 1

    replaced(scenario)


def test_a_rank_that_is_lost_again_while_its_replacement_waits_for_a_sync_gets_another_one():
    """The sync's end and the second loss come in one tick, in which the first replacement still runs."""
    sent = list[int]()

    async def scenario(replacement: Replacement, ranks: Ranks) -> None:
        async def send(rank: int) -> bool:
            sent.append(rank)
            return len(sent) > 1

        replacement.synced(send)
        task = replacement.start(ranks.lose())
        await replacement.needs_sync.wait()
        replacement.synced(send)
        assert replacement.start(ranks.lose()) is task
        await task
        assert ranks.failure is None and ranks.num_started == 2 and sent == [1, 1]
        assert not replacement.needs_sync.is_set()

    replaced(scenario)


def test_a_failure_that_ended_a_replacement_is_raised_again_and_a_later_one_starts_another():
    async def scenario(replacement: Replacement, ranks: Ranks) -> None:
        failure = ranks.lose()
        for _ in range(2):  # two turns
            with pytest.raises(RankFailure) as caught:
                await replacement.start(failure)
            assert caught.value is failure and len(failure.__notes__) == 1
        replacement.max_restarts = 3
        ranks.fails = [RankFailure(1, "start", "its machine is gone", kind="ended")]
        await replacement.start(ranks.lose())
        assert ranks.failure is None and replacement.num_restarts == 2

    replaced(scenario, max_restarts=0)


def test_a_replacement_that_could_not_send_weights_does_not_prevent_the_next_one():
    async def scenario(replacement: Replacement, ranks: Ranks) -> None:
        async def fails(rank: int) -> bool:
            raise SyncError("damaged")

        async def sends(rank: int) -> bool:
            return True

        replacement.synced(fails)
        with suppress(SyncError):
            await replacement.start(ranks.lose())
        replacement.synced(sends)
        await replacement.start(ranks.lose())
        assert ranks.num_started == 2

    replaced(scenario)
