"""The admission gate of ServerEngine: which requests wait in this process, and which were sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

_ABORT_AGAIN_S = 0.1  # aborts are repeated: a request may not have reached the server's scheduler yet


class Gate:
    """Tracks requests from their `admission` to the end of their answer.

    During a sync, and while memory is released, requests wait in this process and not in the server. So each of them
    can be aborted, and none is sampled with weights of a wrong version. Waits for: the gate. Unblocked by: `open`,
    `abort`.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]):
        """abort: makes the server abort these requests, which were all sent."""
        self.closed = False  # never opened again
        self._abort = abort
        self._open = asyncio.Event()
        self._open.set()
        self.waiting: dict[str, asyncio.Future[None]] = {}  # by request id; done when aborted
        self.sent: dict[str, asyncio.Future[None]] = {}  # also those in the server's queue; done when answered

    @property
    def ids(self) -> Collection[str]:
        """The ids of all requests that wait or were sent."""
        return self.sent.keys() | self.waiting.keys()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def admission(self, request_id: str) -> AsyncIterator[bool]:
        """The context in which a request is sent and its answer is read. Waits until the gate is open; yields False
        when the request was aborted before."""
        aborted = self.waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            while not self._open.is_set() and not aborted.done():
                opened = asyncio.ensure_future(self._open.wait())
                try:
                    await asyncio.wait([opened, aborted], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    opened.cancel()
        finally:
            del self.waiting[request_id]
        if aborted.done() or self.closed:
            yield False
            return
        answered = self.sent[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield True
        finally:
            del self.sent[request_id]
            answered.set_result(None)

    async def abort(self, ids: Collection[str] | None = None) -> int:
        """Abort these requests (None = all), sent or waiting, and wait for their end; returns their number."""
        waiting = [f for name, f in self.waiting.items() if (ids is None or name in ids) and not f.done()]
        for future in waiting:
            future.set_result(None)
        left = {name: f for name, f in self.sent.items() if ids is None or name in ids}
        count = len(waiting) + len(left)
        while left:
            await self._abort(list(left))
            await asyncio.wait(left.values(), timeout=_ABORT_AGAIN_S)
            left = {name: f for name, f in left.items() if not f.done()}
        return count

    async def drained(self) -> None:
        """Wait until the answers to all sent requests have ended."""
        if self.sent:
            await asyncio.wait(self.sent.values())
