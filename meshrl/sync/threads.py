"""Work on runs of bytes, as many at once as torch has threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_SMALL_BYTES = 1 << 20  # threads are not worth their start below


@contextmanager
def cores(num_bytes: int) -> Iterator[Executor]:
    """Where to submit work on so many bytes. Each core takes a task of its own, and torch in it one thread: none waits
    for the others after every operation, as it does where an operation is cut over all threads. A thread of the caller
    that begins with torch meanwhile has one thread, too."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_bytes < _SMALL_BYTES:
        yield _Here()
        return
    try:
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)  # a new thread's own number is also that of those that start after it


class _Here(Executor):
    """Does what is submitted at once, in the caller's thread; an error is the caller's."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done
