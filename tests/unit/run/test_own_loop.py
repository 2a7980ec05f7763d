"""A run has its own event loop, also inside a running loop or in another thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest

from meshrl.config.cluster import ClusterConfig
from meshrl.process.spawn import STOPS
from meshrl.run.signals import Stop, run_in_own_loop, watchdog

HANDLED = (signal.SIGINT, *STOPS, signal.SIGUSR1)


async def work() -> tuple[asyncio.AbstractEventLoop, threading.Thread, str]:
    """Waits, and starts tasks and threads, like a run."""
    await asyncio.gather(asyncio.sleep(0.01), asyncio.create_task(asyncio.sleep(0)))
    name = await asyncio.to_thread(lambda: threading.current_thread().name)
    return asyncio.get_running_loop(), threading.current_thread(), name


def test_without_a_running_loop_a_run_makes_its_own():
    loop, thread, _ = run_in_own_loop(work())
    assert loop.is_closed() and thread is threading.current_thread()


def test_inside_a_running_loop_a_run_has_another_loop_in_the_same_thread():
    """As in a notebook: its cells run inside the kernel's loop, which continues afterwards with tasks and timers."""

    async def notebook() -> None:
        outer, task, ticks = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
        other = asyncio.create_task(asyncio.sleep(0.01, "other"))
        outer.call_later(0.001, ticks.append, 1)
        loop, thread, _ = run_in_own_loop(work())
        assert loop is not outer and loop.is_closed() and thread is threading.current_thread()
        assert asyncio.get_running_loop() is outer and asyncio.current_task() is task
        assert ticks == []  # the notebook's loop is suspended meanwhile
        assert await other == "other" and ticks == [1]
        assert asyncio.get_event_loop_policy().get_event_loop() is outer

    asyncio.run(notebook())


def test_an_exception_in_the_run_leaves_the_outer_loop_unchanged():
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("inner")

    async def notebook() -> None:
        with pytest.raises(KeyError, match="inner"):
            run_in_own_loop(fails())
        await asyncio.sleep(0.001)
        run_in_own_loop(work())

    asyncio.run(notebook())


@pytest.mark.timeout(60)  # else the run never returns
@pytest.mark.parametrize("fails", [False, True])
def test_a_task_that_swallows_its_cancellation_is_named_and_does_not_keep_the_run(fails, monkeypatch, capfd):
    """Others end as before."""
    ended = []

    async def keeps_alive() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def ends() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(True)

    async def main() -> str:
        tasks.extend(asyncio.create_task(each()) for each in (keeps_alive, keeps_alive, ends))
        await asyncio.sleep(0)
        if fails:
            raise KeyError("inner")
        return "result"

    tasks: list[asyncio.Task[None]] = []
    monkeypatch.setattr("meshrl.run.signals._END_S", 0.2)
    with pytest.raises(KeyError) if fails else nullcontext():
        assert run_in_own_loop(main(), "agent mine:Agent") == "result"
    assert ended == [True]
    text = capfd.readouterr().err
    assert "agent mine:Agent has started" in text and text.count(f"keeps_alive ({__file__}:") == 2, text
    for task in tasks[:2]:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_in_another_thread_no_signal_handler_is_changed():
    """Python refuses signal handlers there."""
    before = [signal.getsignal(number) for number in HANDLED]

    async def main() -> list[object]:
        with Stop().listening(), watchdog(ClusterConfig()):
            return [signal.getsignal(number) for number in HANDLED]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_in_own_loop, main()).result() == before
    assert asyncio.run(main()) != before
