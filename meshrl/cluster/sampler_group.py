"""RolloutGroup: all samplers behind typed methods, the routes of requests to them, and the replacement of lost ones.

A lost rank that only samples is replaced by a new one with the same weights, as soon as the loss is detected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Literal, TypeVar

import numpy as np

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import Executor, ignored
from meshrl.core.errors import RankFailure
from meshrl.core.terminal import print_message
from meshrl.core.types import Metric, Request, Turn
from meshrl.rollout.base import join_turns
from meshrl.sync.layout import Layout

T = TypeVar("T")
InFlight = Literal["keep", "abort", "restart"]
SendWeights = Callable[[int], Awaitable[bool]]


class Replacement:
    """The executor's state determines whether a rank is lost; there is at most one task for each rank.

    max_restarts: how many ranks are replaced before the next failure is raised. note: receives a line for each. lock:
    held by a replacement or a sync, because both need all train ranks. needs_sync: set while a new rank waits for a
    sync. layout: of the syncs.
    """

    def __init__(self, executor: Executor, max_restarts: int, note: Callable[[str], None] = print_message):
        self.executor, self.max_restarts, self.note, self.num_restarts = executor, max_restarts, note, 0
        self.lock, self.needs_sync = asyncio.Lock(), asyncio.Event()
        self.layout: Layout | None = None
        self._synced = asyncio.Event()  # set by each sync; a task that waits for the next one clears it first
        self._send_weights: SendWeights | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # the last one of each rank

    def is_possible(self, failure: RankFailure) -> bool:
        """Whether the failure is the loss of a rank that only samples."""
        return failure.kind != "raised" and not self.executor.specs[failure.rank].trains

    def start(self, failure: RankFailure) -> asyncio.Task[None]:
        """The task that replaces the rank of this failure. It is started unless it runs, or has ended with this
        failure."""
        task = self._tasks.get(failure.rank)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not failure)):
            task = self._tasks[failure.rank] = asyncio.create_task(self._replace(failure.rank))
        return task

    def running(self, rank: int) -> asyncio.Task[None] | None:
        """The task that replaces this rank. Until its end the rank may accept requests, but has no weights."""
        task = self._tasks.get(rank)
        return None if task is None or task.done() else task

    async def _replace(self, rank: int) -> None:
        """Waits for: `lock`, the new rank, its weights, and if the trainer is between two versions, the next sync."""
        while True:
            async with self.lock:
                has_weights = True  # also if a sync has replaced the rank
                while (failure := self.executor.failure_of(rank)) is not None:
                    await self.restart(failure)
                    # A rank without a sampler only reserves a device for another rank's sampler.
                    if self._send_weights is not None and self.executor.specs[rank].samples:
                        has_weights = await self._send_weights(rank)
            if has_weights:
                return
            self._synced.clear()
            self.needs_sync.set()
            await self._synced.wait()

    async def restart(self, failure: RankFailure) -> None:
        """Replace a lost rank by a new one without weights. The caller holds `lock`."""
        started_at, rank, lost = time.monotonic(), failure.rank, failure
        while True:
            if not self.is_possible(lost):
                raise lost
            if self.num_restarts >= self.max_restarts:
                lost.add_note(
                    f"the rank is not replaced: ranks replaced so far {self.num_restarts}, cluster.max_restarts "
                    f"{self.max_restarts}. Raise it, or continue the run with run.resume=auto"
                )
                raise lost
            self.num_restarts += 1
            self.note(f"{str(lost).splitlines()[0]}; replacing it")
            try:
                await self.executor.restart([rank])
                if self.layout is not None and self.executor.specs[rank].samples:
                    await self.executor.call(rank, RankWorker.set_layout, self.layout)
                return self.note(f"rank {rank} was replaced in {time.monotonic() - started_at:.1f} s")
            except RankFailure as again:
                if again is lost:
                    raise
                lost = again

    def synced(self, send_weights: SendWeights) -> None:
        """All samplers have got weights. send_weights: sends a new rank the same ones; returns False while the trainer
        is between two versions."""
        self._send_weights = send_weights
        self.needs_sync.clear()
        self._synced.set()

    async def cancel(self) -> None:
        """Cancel all replacements, and send no weights before the next sync, which replaces the lost ranks."""
        self._send_weights = None
        async with self.lock:  # a replacement or sync that has started finishes first
            for task in self._tasks.values():
                task.cancel()
            self._tasks.clear()


class Routes:
    """The routes of requests to samplers. ranks: the samplers.

    num_running: requests that have no answer yet.
    """

    def __init__(self, ranks: Sequence[int]):
        self.ranks, self.num_running = ranks, 0
        self._on_turn_end: Callable[[], None] = ignored
        self._on_session_start: Callable[[str], object] = ignored
        self._of_session: dict[str, int] = {}
        self._num_sessions = dict.fromkeys(ranks, 0)
        self._running = dict.fromkeys(ranks, 0)
        self._busy_since: dict[int, float] = {}
        self._busy_s = 0.0

    def call(self, on_turn_end: Callable[[], None], on_session_start: Callable[[str], object]) -> None:
        """From now on, call on_turn_end when a request has ended, and on_session_start at the first request of a
        session."""
        self._on_turn_end, self._on_session_start = on_turn_end, on_session_start

    def _rank_of(self, session: str) -> int:
        """The sampler with the fewest open sessions, else the first of them. A session stays at its sampler, which
        has its KV cache. Requests without a session go where the fewest requests run.

        After all sessions have ended, the next ones get the same routes as at the start of a run: a resumed run has the
        same rounding as an uninterrupted one.
        """
        if not session:
            return min(self.ranks, key=self._running.__getitem__)
        if session not in self._of_session:
            rank = self._of_session[session] = min(self.ranks, key=self._num_sessions.__getitem__)
            self._num_sessions[rank] += 1
            self._on_session_start(session)
        return self._of_session[session]

    def end_session(self, session: str) -> None:
        """Called when a session has no more requests."""
        if session in self._of_session:
            self._num_sessions[self._of_session.pop(session)] -= 1

    @contextmanager
    def request(self, session: str) -> Iterator[int]:
        """The context of a request of this session; the rank of its sampler."""
        rank = self._rank_of(session)
        if not self._running[rank]:
            self._busy_since[rank] = time.perf_counter()
        self._running[rank] += 1
        self.num_running += 1
        try:
            yield rank
        finally:
            self._running[rank] -= 1
            self.num_running -= 1
            if not self._running[rank]:
                self._busy_s += time.perf_counter() - self._busy_since.pop(rank)
            self._on_turn_end()

    def take_busy_s(self) -> float:
        """Seconds in which a rank had a request, summed over the ranks, since the last call."""
        now = time.perf_counter()
        taken, self._busy_s = self._busy_s + sum(now - since for since in self._busy_since.values()), 0.0
        self._busy_since = dict.fromkeys(self._busy_since, now)
        return taken


class RolloutGroup:
    """All samplers, with the interface of one. It continues aborted turns, and sends a turn again if its sampler was
    lost and replaced.

    in_flight: what happens to running turns when new weights arrive; each token records its version in any case. keep =
    they stay in their engine; an engine that can't keep them finishes them first. abort = the engine aborts them, and
    they continue from their last token after the sync. restart = they begin again, so that a turn has one version.
    num_redone: turns sent again. releases_memory: whether colocated samplers release their memory for the trainer.
    shares_devices: whether trainer and samplers use devices in turns. Both are known after `reconcile`.
    """

    def __init__(
        self,
        executor: Executor,
        max_restarts: int = 0,
        note: Callable[[str], None] = print_message,
        in_flight: InFlight = "keep",
    ):
        self.executor, self.in_flight = executor, in_flight
        self.routes = Routes([spec.rank for spec in executor.specs if spec.samples])
        self.replacement = Replacement(executor, max_restarts, note)
        self.num_redone = self.num_failed_syncs = 0
        self.releases_memory = self.shares_devices = False
        self._may_generate = asyncio.Event()  # cleared during a sync that aborts turns
        self._may_generate.set()
        self._reported = (0, 0)
        self._aborts: set[asyncio.Task[int]] = set()

    async def generate(self, request: Request) -> Turn:
        """Sample one complete turn: an aborted request is sent again, with the output so far as its prefix. A cancelled
        call ends its request in the sampler, too."""
        with self.routes.request(request.session) as rank:
            try:
                return await self._generate(rank, request)
            except asyncio.CancelledError:
                abort = asyncio.ensure_future(self.executor.call(rank, RankWorker.abort, [request.id]))
                self._aborts.add(abort)
                abort.add_done_callback(self._aborts.discard)
                abort.add_done_callback(lambda task: task.cancelled() or task.exception())  # the rank may be lost
                raise

    async def _generate(self, rank: int, request: Request) -> Turn:
        parts: list[Turn] = []
        asked = request
        while True:
            # Either may begin while this task waits for the end of the other.
            while (replacing := self.replacement.running(rank)) is not None or not self._may_generate.is_set():
                await (self._may_generate.wait() if replacing is None else asyncio.shield(replacing))
            try:
                turn = await self.executor.call(rank, RankWorker.generate, asked)
            except RankFailure as failure:
                if not self.replacement.is_possible(failure):
                    raise
                await asyncio.shield(self.replacement.start(failure))  # other turns wait for it, too
                self.num_redone += 1
                continue
            parts.append(turn)
            if turn.stop_reason != "abort":
                return parts[0] if len(parts) == 1 else join_turns(parts)
            async with self.replacement.lock:  # a sync that failed is repeated, and this rank must get weights first
                pass
            if self.in_flight == "restart":
                parts.clear()
            asked = request
            if parts:  # the same request, with all tokens sampled so far as its prefix
                prefix = np.concatenate([request.prefix_output, *(part.output_ids for part in parts)])
                asked = dataclasses.replace(request, prefix_output=prefix)

    def computed_tokens(self) -> int:
        """Tokens that all samplers have computed. It stands still when none of them makes progress."""
        return sum(map(self.executor.computed_tokens, self.routes.ranks))

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Context of a sync: aborts the running turns, except with in_flight = keep."""
        if self.in_flight == "keep":
            yield
            return
        self._may_generate.clear()
        try:
            await self._where_not_lost(lambda rank: self.executor.call(rank, RankWorker.abort))
            yield
        finally:
            self._may_generate.set()

    async def probe(self, requests: Sequence[Request]) -> list[Turn]:
        """The answers of every sampler to these requests, which are no load of `routes`."""
        turns = (self._generate(rank, request) for rank in self.routes.ranks for request in requests)
        return [*await asyncio.gather(*turns)]

    async def release_memory(self) -> int:
        """Free the memory of colocated samplers until the next sync; returns bytes. No request may be running."""
        calls = (self.executor.call(rank, RankWorker.release_memory) for rank in self.routes.ranks)
        return sum(await asyncio.gather(*calls))

    async def kv_cache_bytes(self) -> int | None:
        """The smallest limit of a KV cache that the free memory of a device decides; None = none does."""
        limits = await self._where_not_lost(lambda rank: self.executor.call(rank, RankWorker.kv_cache_bytes))
        return min((limit for limit in limits.values() if limit is not None), default=None)

    async def reconcile(self, layout: Layout) -> None:
        """Compare the trainer's layout with every sampler's own parameters."""
        self.replacement.layout = layout
        only_train = [spec.rank for spec in self.executor.specs if spec.trains and not spec.samples]
        await asyncio.gather(*(self.executor.call(rank, RankWorker.set_layout, layout) for rank in only_train))
        answers = await self._where_not_lost(lambda rank: self.executor.call(rank, RankWorker.set_layout, layout))
        self.releases_memory, self.shares_devices = (any(each) for each in zip(*answers.values(), (False, False)))

    async def trust_loaded_weights(self) -> None:
        async def trust(rank: int) -> bool:
            await self.executor.call(rank, RankWorker.trust_loaded_weights)
            return True

        self.replacement.synced(trust)
        await asyncio.gather(*map(trust, self.routes.ranks))

    async def invalidate(self) -> None:
        """Make the ranks that only sample drop their requests and weights: the trainer returns to an earlier version.
        They sample again after `reconcile` and a full sync; lost ranks are replaced then."""
        await self.replacement.cancel()
        only_sampling = [rank for rank in self.routes.ranks if not self.executor.specs[rank].trains]
        await self._where_not_lost(lambda rank: self.executor.call(rank, RankWorker.cancel_sync), only_sampling)

    async def _where_not_lost(
        self, call: Callable[[int], Awaitable[T]], ranks: Sequence[int] | None = None
    ) -> dict[int, T]:
        """Call the samplers, or these ranks; returns the answers by rank. Lost ranks that only sample have none: their
        replacements start without state."""
        asked, answers = self.routes.ranks if ranks is None else ranks, dict[int, T]()
        for rank, outcome in zip(asked, await asyncio.gather(*map(call, asked), return_exceptions=True), strict=True):
            if not isinstance(outcome, BaseException):
                answers[rank] = outcome
            elif not isinstance(outcome, RankFailure) or not self.replacement.is_possible(outcome):
                raise outcome
        return answers

    def replacement_metrics(self) -> list[Metric]:
        """Metrics: ranks replaced and requests sent again since the last call."""
        (restarts, redone), self._reported = self._reported, (self.replacement.num_restarts, self.num_redone)
        return [
            Metric(name="rollout/ranks_replaced", sum=self._reported[0] - restarts, reduce="sum", unit="ranks"),
            Metric(name="rollout/requests_retried", sum=self._reported[1] - redone, reduce="sum", unit="requests"),
        ]
