"""The engine of every sampler that is a server: vLLM, SGLang, or any endpoint. A Dialect describes the server.

Servers get and return token ids; nothing is tokenized. Logprobs belong to the distribution that was sampled from, with
temperature applied.

Weights may change while requests run: the server drops its KV cache and computes it again with the new weights, so
every logprob belongs exactly to the recorded weight version.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

from meshrl.core.errors import CapabilityError, EngineEnded
from meshrl.core.types import Request, Turn
from meshrl.rollout.admission import bounds_of, check_admission
from meshrl.rollout.base import EngineStats, check_parts
from meshrl.rollout.server.answer import Labels, ServerAnswer
from meshrl.rollout.server.dialect import Dialect
from meshrl.rollout.server.weights import ServerWeights
from meshrl.rollout.stop_strings import StopStrings
from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Ack, Layout, SyncHeader

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


class ServerEngine:
    """rollout.base.RolloutEngine over a server.

    Consumes requests; each one is a stream from the server. A sync and released memory shut a gate in this process, at
    which requests wait; `commit`, `cancel` and `restore` open it. After a server that is a child of this process has
    ended, all calls raise EngineEnded.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        vocab_size: int,
        keep_weights: bool = False,
        adapter_scale: float = 1.0,
        stop_strings: StopStrings | None = None,
    ):
        """keep_weights: keep a copy in this machine's memory, for syncs of changes only. adapter_scale: alpha / rank of
        the adapters in such syncs, which this process merges into the base."""
        self.engine_id, self.capabilities = dialect.http.name, dialect.capabilities
        self.max_context_tokens = max_context_tokens
        self._dialect = dialect
        self._stop_token_ids, self._vocab_size = stop_token_ids, vocab_size
        self._stop_strings = stop_strings or StopStrings()
        self._gate = Gate(dialect.abort)
        self._weights = ServerWeights(dialect.call_workers, self.engine_id, keep_weights, adapter_scale)
        self._state = self._weights.state
        self._run = secrets.token_hex(4)  # part of the labels, so that weights of another client have other labels
        self._labels: dict[str, int] = {}
        self._totals = EngineStats()
        self._released: set[str] = set()

    # ---- generation

    async def generate(self, request: Request) -> Turn:
        check_admission(request, self.engine_id, self._state.expected, self._gate.closed, self._gate.ids)
        bounds = bounds_of(request, self._stop_token_ids, self.max_context_tokens, self._vocab_size)
        self._dialect.check(request, bounds)
        search = self._stop_strings.search(request)
        async with self._gate.admission(request.id) as is_admitted:
            versions: Labels | int = self._state.version if self._dialect.loaded_label is None else self._labels
            answer = ServerAnswer(request, bounds, self._dialect.name, versions, search)
            if not is_admitted:
                answer.reason = "abort"
                return answer.turn(self.engine_id)
            async with aclosing(self._dialect.stream(request, bounds)) as parts:
                async for part in parts:
                    self._totals.decode_tokens += answer.add(part)
                    if answer.needs_abort:
                        await self._dialect.abort([request.id])
            turn = answer.turn(self.engine_id)
        self._totals.prefill_tokens += len(request.context_ids) - turn.times.cached_tokens
        return turn

    async def abort(self, ids: Sequence[str] | None = None) -> int:
        return await self._gate.abort(ids)

    async def _pause(self) -> None:
        """After this nothing is sent or sampled; running requests stay in place, or have finished."""
        self._gate.shut()
        if not self.capabilities.in_flight:
            await self._gate.drained()
        await self._dialect.pause()

    async def _resume_if_allowed(self) -> None:
        """Resume the server and open the gate, unless a release or a sync still prevents it."""
        if self._released or self._state.awaits_sync:
            return
        await self._dialect.resume()
        self._gate.open()

    # ---- weights

    def trust_loaded_weights(self, version: int = 0) -> None:
        self._state.trust(version)
        self._labels = {self._dialect.loaded_label or "": version}

    async def reconcile(self, layout: Layout) -> None:
        await self._pause()
        try:
            await self._weights.reconcile(layout)
        finally:
            await self._resume_if_allowed()

    async def begin(self, header: SyncHeader) -> None:
        """Pause all requests, drop the cache, and expect the transfers of this version."""
        await self._pause()
        await self._dialect.begin_update(self._label(header.version), "kv_cache" not in self._released)
        await self._weights.begin(header)

    async def receive(self, *deliveries: Delivery) -> None:
        await self._weights.receive(*deliveries)

    async def commit(self) -> Ack:
        """Read every parameter back, make the version visible, and resume. Every cache has been dropped."""
        ack = await self._weights.commit()
        await self._dialect.end_update(self._label(ack.version))
        self._labels[self._label(ack.version)] = ack.version
        await self._resume_if_allowed()
        return ack

    async def cancel(self) -> None:
        """All requests are aborted, and new ones are refused until the next full sync."""
        self._gate.shut()
        try:
            await self._weights.cancel()
        finally:  # requests must not wait for ever, even if the cancel has failed
            await self.abort()
            await self._resume_if_allowed()

    def _label(self, version: int) -> str:
        return f"{self._run}:{version}"

    # ---- memory and the rest

    async def release(self, parts: set[str]) -> int:
        """Bytes are summed over all workers. Running requests stay in place and lose their cache, or finish first;
        later requests wait."""
        self._check_parts(parts)
        new = parts - self._released
        if not new:
            return 0
        self._gate.shut()
        if self._dialect.drains_before_release:
            await self._gate.drained()
        await self._pause()
        if "weights" in new:
            self._state.end("released")
        self._released |= new
        return await self._dialect.release(new)

    async def restore(self, parts: set[str]) -> int:
        self._check_parts(parts)
        back = parts & self._released
        taken = await self._dialect.restore(back) if back else 0
        self._released -= back
        await self._resume_if_allowed()
        return taken

    def _check_parts(self, parts: set[str]) -> None:
        check_parts(parts)
        if not self.capabilities.release:
            raise CapabilityError(f"{self.engine_id} can't release its memory: {self._dialect.no_release}")

    def stats(self) -> EngineStats:
        return dataclasses.replace(
            self._totals,
            running=len(self._gate.sent),
            waiting=len(self._gate.waiting),
            version=self._state.version,
        )

    async def close(self) -> None:
        """Abort all requests, and stop the server if this engine has started it."""
        self._gate.closed = True
        try:
            with suppress(EngineEnded):
                await self.abort()
        finally:
            self._weights.close()
            await self._dialect.close()
