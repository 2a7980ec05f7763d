"""The admission gate of a server's engine: which requests wait in this process, and which were sent."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from meshrl.core.types import Request, Turn
from meshrl.rollout.base import EngineStats, PauseMode

_ABORT_AGAIN_S = 0.1  # a request that had not reached the server's scheduler when it was aborted is aborted again


class Gate:
    """Requests from their arrival to the end of their answer.

    The gate holds requests back during a pause, during a sync, and while the engine's memory is released. They wait in
    this process and not in the server, so that each of them can be aborted, and none is sampled with weights that it
    must not see. Waits for: the gate. Unblocked by: `open`, `abort`.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]):
        """abort: has the server end these requests, all of which were sent."""
        self.pause_mode: PauseMode | None = None
        self.closed = False  # for ever
        self._abort = abort
        self._open = asyncio.Event()
        self._open.set()
        self._waiting: dict[str, asyncio.Future[None]] = {}  # done when aborted
        self._sent: dict[str, asyncio.Future[None]] = {}  # done when the answer has ended
        self._totals = EngineStats()

    @property
    def ids(self) -> Collection[str]:
        """Of all requests that wait or were sent."""
        return self._sent.keys() | self._waiting.keys()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def pause(self, mode: PauseMode) -> None:
        """Shut the gate; wait = until running requests have finished, abort = abort all, keep = at once."""
        self.pause_mode = mode
        self.shut()
        if mode == "abort":
            await self.abort()
        elif mode == "wait":
            await self.drained()

    async def admitted(self, request_id: str) -> bool:
        """Wait until the gate is open; False when the request was aborted before."""
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
        """Around the exchange with the server."""
        ended = self._sent[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._sent[request_id]
            ended.set_result(None)

    async def abort(self, ids: Collection[str] | None = None) -> int:
        """Abort these requests (None = all), sent or not, and wait for their end; returns how many there were."""
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
        """Tokens that a stream has brought."""
        self._totals.decode_tokens += num_new

    def count_turn(self, request: Request, turn: Turn) -> None:
        """A turn whose stream has ended."""
        self._totals.prefill_tokens += len(request.context_ids) - turn.times.cached_tokens
        self._totals.prefill_s += turn.times.prefill_s
        self._totals.decode_s += turn.times.decode_s

    def stats(self, version: int, max_running: int) -> EngineStats:
        """As this process knows them: a request in the server's own queue counts as running."""
        running = len(self._sent)
        return dataclasses.replace(
            self._totals,
            running=running,
            waiting=len(self._waiting),
            free_slots=max(0, max_running - running),
            version=version,
        )
