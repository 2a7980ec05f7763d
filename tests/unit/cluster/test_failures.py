"""What ends a wait for ranks, and when a lost sampler is replaced. No processes."""

from __future__ import annotations

import asyncio
import functools
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


async def ended(cleanup: list[str], error: Exception | None = None) -> None:
    """Work that never ends by itself. error: raised at its end."""
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.05)
        cleanup.append("ended")
        if error is not None:
            raise error


OF_THE_WORK = ValueError("of the work")


@pytest.mark.parametrize(
    ("events", "error", "expected"),
    [
        ([OF_A_TRAINER, LATER], None, OF_A_TRAINER),
        (["signal"], None, asyncio.CancelledError),
        ([OF_A_TRAINER, "signal"], None, asyncio.CancelledError),
        (["signal"], OF_THE_WORK, OF_THE_WORK),
        ([OF_A_TRAINER], OF_THE_WORK, OF_THE_WORK),
    ],
    ids=["two failures", "signal", "failure and signal", "error at a signal", "error at a failure"],
)
def test_a_wait_ends_with_the_work_which_is_interrupted_once_and_whose_error_is_not_hidden(events, error, expected):
    """A run that ends with an error saves its last step and reports the error."""
    cleanup = list[str]()

    async def scenario(groups: Groups) -> None:
        task = asyncio.current_task()
        assert task is not None
        for number, event in enumerate(events, 1):
            action = task.cancel if event == "signal" else functools.partial(groups.lost, event)
            asyncio.get_running_loop().call_later(0.01 * number, action)
        await groups.until_failure(ended(cleanup, error))

    found = outcome(scenario)
    assert (found is expected or type(found) is expected) and cleanup == ["ended"]


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
