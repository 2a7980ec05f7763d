"""Code that blocks the controller's event loop ends the run's process, and its stack is printed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.run import signals as module
from meshrl.run.signals import watchdog


def test_a_call_that_blocks_for_longer_than_any_phase_may_take_ends_the_process():
    """Also one that catches every exception."""
    code = """
        import asyncio, time
        from meshrl.config.cluster import ClusterConfig
        from meshrl.run import signals as module
        module._BEAT_S = 0.05

        async def agent_that_blocks():
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass

        async def main():
            with module.watchdog(ClusterConfig(timeout_s=0.3)):
                await asyncio.sleep(0.5)
                print("waited", flush=True)
                await agent_that_blocks()

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "waited\n")
    assert done.stderr.startswith("Timeout (0:00:00.4") and "in agent_that_blocks" in done.stderr


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
