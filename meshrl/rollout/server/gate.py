"""The admission gate of ServerEngine: which requests wait in this process, and which were sent."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from meshrl.core.types import Request, Turn
from meshrl.rollout.base import EngineStats, PauseMode

_ABORT_AGAIN_S = 0.1  # aborts are repeated: a request may not have reached the server's scheduler yet


class Gate:
    """Tracks requests from `admitted` to the end of their answer.

    During a pause, during a sync, and while memory is released, requests wait in this process and not in the server. So
    each of them can be aborted, and none is sampled with weights of a wrong version. Waits for: the gate. Unblocked by:
    `open`, `abort`.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]):
        """abort: makes the server abort these requests, which were all sent."""
        self.pause_mode: PauseMode | None = None
        self.closed = False  # never opened again
        self._abort = abort
        self._open = asyncio.Event()
        self._open.set()
        self._waiting: dict[str, asyncio.Future[None]] = {}  # done when aborted
        self._sent: dict[str, asyncio.Future[None]] = {}  # done when the answer has ended
        self._totals = EngineStats()

    @property
    def ids(self) -> Collection[str]:
        """The ids of all requests that wait or were sent."""
        return self._sent.keys() | self._waiting.keys()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def pause(self, mode: PauseMode) -> None:
        """Shut the gate. wait: until running requests have finished; abort: abort all; keep: return at once."""
        self.pause_mode = mode
        self.shut()
        if mode == "abort":
            await self.abort()
        elif mode == "wait":
            await self.drained()

    async def admitted(self, request_id: str) -> bool:
        """Wait until the gate is open; returns False when the request was aborted before."""
        aborted = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            while not self._open.is_set() and not aborted.done():
                opened = asyncio.ensure_future(self._open.wait())
                await asyncio.wait([opened, aborted], return_when=asyncio.FIRST_COMPLETED)
                opened.cancel()
            return not (aborted.done() or self.closed)
        finally:
            del self._waiting[request_id]

    @contextmanager
    def sending(self, request_id: str) -> Iterator[None]:
        """The context in which a request is sent and its answer is read."""
        ended = self._sent[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._sent[request_id]
            ended.set_result(None)

    async def abort(self, ids: Collection[str] | None = None) -> int:
        """Abort these requests (None = all), sent or waiting, and wait for their end; returns their number."""
        waiting = [f for name, f in self._waiting.items() if (ids is None or name in ids) and not f.done()]
        for future in waiting:
            future.set_result(None)
        left = {name: f for name, f in self._sent.items() if ids is None or name in ids}
        count = len(waiting) + len(left)
        while left:
            await self._abort(list(left))
            await asyncio.wait(left.values(), timeout=_ABORT_AGAIN_S)
            left = {name: f for name, f in left.items() if not f.done()}
        return count

    async def drained(self) -> None:
        """Wait until the answers to all sent requests have ended."""
        if self._sent:
            await asyncio.wait(self._sent.values())

    def count_tokens(self, num_new: int) -> None:
        """Count new tokens of a stream."""
        self._totals.decode_tokens += num_new

    def count_turn(self, request: Request, turn: Turn) -> None:
        """Count a finished turn."""
        self._totals.prefill_tokens += len(request.context_ids) - turn.times.cached_tokens
        self._totals.prefill_s += turn.times.prefill_s
        self._totals.decode_s += turn.times.decode_s

    def stats(self, version: int, max_running: int) -> EngineStats:
        """The engine's stats, as far as this process knows: a request in the server's own queue counts as running."""
        running = len(self._sent)
        return dataclasses.replace(
            self._totals,
            running=running,
            waiting=len(self._waiting),
            free_slots=max(0, max_running - running),
            version=version,
        )
