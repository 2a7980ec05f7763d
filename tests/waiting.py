"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 30.0


def wait_until(holds: Callable[[], bool]) -> bool:
    """Whether it holds before the timeout ends."""
    end = time.monotonic() + TIMEOUT_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
