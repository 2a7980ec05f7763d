from __future__ import annotations

import asyncio

import pytest

from meshrl.monitor.recorder import Spans, current_span, latest_span


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_phases_add_up_by_name_and_are_taken_once():
    clock = Clock()
    spans = Spans(clock)
    for took in (2.0, 3.0):
        with spans("rollout"):
            clock.now += took
        clock.now += 10
    with spans("train"):
        clock.now += 1.0
    assert spans.seconds("rollout") == 5.0
    taken = {m.name: (m.sum, m.reduce, m.unit) for m in spans.take()}
    assert taken == {"time/rollout_s": (5.0, "sum", "s"), "time/train_s": (1.0, "sum", "s")}
    assert spans.take() == []


def test_tasks_that_share_a_phase_count_its_wall_time_once():
    clock = Clock()
    spans = Spans(clock)

    async def work(start, end):
        await at(start)
        with spans("rollout"):
            await at(end)

    async def at(time):
        while clock.now < time:
            await asyncio.sleep(0)

    async def tick():
        for now in range(12):
            clock.now = float(now)
            for _ in range(5):
                await asyncio.sleep(0)

    async def main():
        await asyncio.gather(work(1, 4), work(2, 6), work(8, 9), tick())

    asyncio.run(main())
    assert spans.seconds("rollout") == pytest.approx(6.0)  # 1..6 and 8..9, not 3 + 4 + 1


def test_a_phase_that_raises_is_still_counted_and_closed():
    clock = Clock()
    spans = Spans(clock)
    with pytest.raises(KeyError), spans("train"):
        clock.now += 2.0
        raise KeyError
    with spans("train"):
        clock.now += 1.0
    assert spans.seconds("train") == 3.0


def test_a_task_has_the_phase_in_which_it_was_created_and_the_run_the_phase_entered_last():
    entered = []
    spans = Spans(entered=entered.append)

    async def eval_task():
        with spans("inner"):
            pass
        await asyncio.sleep(0)
        return current_span()

    async def main():
        with spans("eval"):
            task = asyncio.create_task(eval_task())
        with spans("train"):
            assert (await task, current_span(), latest_span()) == ("eval", "train", "train")
        return current_span(), latest_span()

    assert asyncio.run(main()) == ("", "")
    assert entered == ["eval", "", "train", "inner", "train", ""]


def test_a_single_phase_can_be_taken():
    """An evaluation reports its own time, and leaves the others to the step's report."""
    now = [0.0]
    spans = Spans(clock=lambda: now[0])
    with spans("sync"):
        now[0] = 2.0
    with spans("rollout"), spans("eval"):
        now[0] = 5.0
    assert {m.name: m.sum for m in spans.take("eval")} == {"time/eval_s": 3.0}
    assert {m.name: m.sum for m in spans.take()} == {"time/sync_s": 2.0, "time/rollout_s": 3.0}
