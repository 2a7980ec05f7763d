"""Code that blocks the controller's event loop ends the run's process, and its stack is printed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.run import signals as module
from meshrl.run.signals import watchdog


async def agent_that_blocks() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def test_a_call_that_blocks_for_longer_than_any_phase_may_take_ends_the_process(monkeypatch, capfd):
    """Also one that catches every exception."""
    monkeypatch.setattr(module, "_BEAT_S", 0.05)

    async def main() -> None:
        with watchdog(ClusterConfig(timeout_s=0.3)):
            await asyncio.sleep(0.5)
            os.write(1, b"waited\n")
            await agent_that_blocks()

    if (child := os.fork()) == 0:
        signal.alarm(30)  # in case it is not ended
        try:
            asyncio.run(main())
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    printed = capfd.readouterr()
    assert (code, printed.out) == (1, "waited\n")
    assert printed.err.startswith("Timeout (0:00:00.4") and "in agent_that_blocks" in printed.err


def test_a_phase_with_a_longer_deadline_is_not_ended_and_nothing_is_left_behind(monkeypatch):
    monkeypatch.setattr(module, "_BEAT_S", 0.05)

    async def main():
        with watchdog(ClusterConfig(timeout_s=0.1, deadlines=Deadlines(checkpoint=60))):
            time.sleep(0.5)

    asyncio.run(main())
    with_timer = ClusterConfig(timeout_s=0.1)

    async def ended():
        with watchdog(with_timer):
            pass

    asyncio.run(ended())
    time.sleep(0.5)
