"""The time limit of a user's code."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from meshrl.data import time_limit
from meshrl.data.time_limit import TooLongError


def test_no_exception_of_a_time_limit_is_raised_after_its_block(monkeypatch: pytest.MonkeyPatch):
    """The blocks of four threads end at about their limit, while the watchdog sets exceptions very often."""
    monkeypatch.setattr(time_limit, "_TICK_S", 0.0005)
    raised_in, raised_after = [], []

    def limited_blocks(until: float) -> None:
        while time.monotonic() < until:
            try:
                try:
                    with time_limit.time_limit(0.0007):
                        end = time.monotonic() + 0.001
                        while time.monotonic() < end:
                            pass
                except TooLongError as error:
                    raised_in.append(error)
                for _ in range(2000):
                    pass
            except TooLongError as error:
                raised_after.append(error)

    threads = [threading.Thread(target=limited_blocks, args=[time.monotonic() + 0.5]) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert len(raised_in) > 10 and not raised_after
