"""Work on bytes with as many threads as torch has; and the seconds that each stage takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")
_SMALL_BYTES = 1 << 20  # below this, threads cost more than they gain
_lock = threading.Lock()


def lap(seconds: dict[str, float], stage: str, since: float) -> float:
    """Add the time since `since` to a stage; several threads may call it at once. Returns the current time."""
    now = time.perf_counter()
    with _lock:
        seconds[stage] += now - since
    return now


def in_threads(work: Callable[[S], T], items: Sequence[S], num_bytes: Sequence[int]) -> list[T]:
    """The result of `work` for each item. num_bytes: that each item works on; items of few bytes are worked on in the
    caller's thread.

    Each core works on its own item, with one torch thread, so that cores do not wait for each other after every
    operation, as they do when torch splits each operation. The caller and other threads that first use torch meanwhile
    have one torch thread, too.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or sum(num_bytes) < _SMALL_BYTES:
        return [work(item) for item in items]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            begun = [pool.submit(work, x) if n >= _SMALL_BYTES else None for x, n in zip(items, num_bytes, strict=True)]
            return [work(x) if call is None else call.result() for x, call in zip(items, begun, strict=True)]
    finally:
        torch.set_num_threads(num_threads)  # set_num_threads in a thread also sets the default of later threads
