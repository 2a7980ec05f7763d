"""Lost ranks that only sample are replaced by new ones with the same weights, as soon as the loss is detected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import Executor
from meshrl.core.errors import RankFailure
from meshrl.core.terminal import print_message
from meshrl.sync.layout import Layout

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
        """Replace a lost rank by a new one without weights. The caller holds `lock`.

        Raises: the failure, if its rank trains, the run has failed, or max_restarts is used up.
        """
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
