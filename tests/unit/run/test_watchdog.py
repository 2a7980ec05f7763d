"""User code that blocks the controller's event loop ends the run, and the error shows its stack."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.core.errors import DeadlineError
from meshrl.monitor.spans import Spans
from meshrl.run import watchdog as module
from meshrl.run.watchdog import watchdog

CLUSTER = ClusterConfig(timeout_s=60, deadlines=Deadlines(rollout=0.3, checkpoint=0.3))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(module, "_SLACK_S", 0.0)


async def agent_that_blocks():
    time.sleep(60)


async def _main(span, work):
    with watchdog(CLUSTER), Spans()(span):
        await work()


@pytest.mark.parametrize(("span", "phase"), [("rollout", "rollout"), ("save", "checkpoint")])
def test_a_call_that_blocks_is_interrupted_and_shown(span, phase):
    with pytest.raises(DeadlineError) as error:
        asyncio.run(_main(span, agent_that_blocks))
    assert str(error.value).startswith(f"phase '{phase}': one call has blocked the controller for")
    assert "time.sleep(60)" in str(error.value) and "in agent_that_blocks" in str(error.value)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_awaiting_code_and_phases_with_longer_deadlines_are_not_interrupted():
    async def waits():
        for _ in range(10):
            await asyncio.sleep(0.08)

    async def busy():
        time.sleep(0.6)

    asyncio.run(_main("rollout", waits))
    asyncio.run(_main("train", busy))


def test_a_call_that_can_not_be_interrupted_ends_the_process():
    code = """
        import asyncio, re
        from meshrl.config.cluster import ClusterConfig, Deadlines
        from meshrl.run import watchdog as module
        from meshrl.monitor.spans import Spans
        module._CHECK_EVERY_S, module._SLACK_S, module._GRACE_S = 0.05, 0.0, 0.3

        async def main():
            with module.watchdog(ClusterConfig(deadlines=Deadlines(reward=0.3))), Spans()("reward"):
                while True:
                    try:
                        import time; time.sleep(60)
                    except Exception:
                        pass

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("meshrl: DeadlineError: phase 'reward': one call has blocked the controller")
