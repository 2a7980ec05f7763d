"""A thread pool for work on bytes, with as many threads as torch has; and the seconds that each stage takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_SMALL_BYTES = 1 << 20  # below this, threads cost more than they gain
_lock = threading.Lock()


def lap(seconds: dict[str, float], stage: str, since: float) -> float:
    """Add the time since `since` to a stage; several threads may call it at once. Returns the current time."""
    now = time.perf_counter()
    with _lock:
        seconds[stage] += now - since
    return now


@contextmanager
def thread_pool(num_bytes: int) -> Iterator[Executor]:
    """An executor for work on `num_bytes` in total. Each core runs its own task, with one torch thread, so that cores
    do not wait for each other after every operation, as they do when torch splits each operation. The caller and other
    threads that first use torch meanwhile have one torch thread, too."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_bytes < _SMALL_BYTES:
        yield _INLINE
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)  # set_num_threads in a thread also sets the default of later threads


def submit(pool: Executor, num_bytes: int, fn: Callable[..., T], /, *args: Any) -> Future[T]:
    """Run `fn(*args)` in the pool; if it works on few bytes, at once in the caller's thread, which costs less."""
    return (pool if num_bytes >= _SMALL_BYTES else _INLINE).submit(fn, *args)


class _InlineExecutor(Executor):
    """Runs each call at once in the caller's thread, and raises its errors there."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


_INLINE = _InlineExecutor()
