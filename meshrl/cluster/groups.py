"""TrainGroup and RolloutGroup: all ranks of a kind behind typed methods. What the loops talk to.

A method's work is done by the RankWorker method of the same name; `executor.call(rank, RankWorker.method, ...)` is
the only way there, whatever the executor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from meshrl.cluster.actors import RankWorker, UpdateReport
from meshrl.cluster.executor import Executor
from meshrl.core.batch import LossFn
from meshrl.core.errors import SyncError
from meshrl.core.types import Metric, Request, Sample, Turn
from meshrl.rollout.base import EngineStats
from meshrl.rollout.continuation import join_turns
from meshrl.sync.manifest import Ack, Layout, SyncHeader
from meshrl.sync.send import send_weights
from meshrl.sync.transport import BucketRef
from meshrl.train.engine import RowArrays, StepReport
from meshrl.train.plan import Plan, make_plan

_MAX_SESSIONS = 100_000  # remembered routes; older sessions are routed anew


class TrainGroup:
    """All train ranks. Every method is one collective command, sent to the ranks in the order of the calls."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.num_ranks = executor.specs[0].num_train_ranks
        self.cfg = executor.specs[0].train
        self.version = -1  # of the last committed sync

    def plan(self, samples: Sequence[Sample]) -> Plan:
        """The packing plan of these samples, made here once for all ranks."""
        lengths = [len(s) for s in samples]
        if not self.cfg.share_prompts:
            return make_plan(lengths, self.num_ranks, self.cfg.max_tokens_per_microbatch)
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(s.group_id, len(numbers)) for s in samples]
        prefixes = [s.prefix_len if len(s) > s.prefix_len and s.routed_experts is None else 0 for s in samples]
        return make_plan(lengths, self.num_ranks, self.cfg.max_tokens_per_microbatch, groups, prefixes)

    async def forward(self, samples: Sequence[Sample], plan: Plan, role: str) -> list[np.ndarray]:
        """Logprobs of all samples under `policy` or `reference`, in their order; float32[T] each."""
        parts: list[RowArrays] = await self._rows(RankWorker.forward, samples, plan, role)
        rows = {i: array for part in parts for i, array in part.items()}
        return [rows[i] for i in range(len(samples))]

    async def forward_backward(self, samples: Sequence[Sample], plan: Plan, loss: LossFn) -> UpdateReport:
        """Add the gradient of these samples; the ranks' metrics together."""
        reports: list[UpdateReport] = await self._rows(RankWorker.forward_backward, samples, plan, loss)
        return UpdateReport(
            metrics=[m for r in reports for m in r.metrics], mismatch=[m for r in reports for m in r.mismatch]
        )

    async def optim_step(self, lr: float) -> StepReport:
        return (await self._all(RankWorker.optim_step, lr))[0]

    async def layout(self, bucket_bytes: int) -> Layout:
        return (await self._all(RankWorker.layout, bucket_bytes))[0]

    async def export(self, path: str, tokenizer_from: str | None) -> None:
        """Write a folder that `from_pretrained` loads."""
        await self._all(RankWorker.export, path, tokenizer_from)

    async def memory(self) -> list[tuple[list[Metric], dict[str, int]]]:
        """Each rank's memory metrics, and its engine's bytes by kind."""
        return await self._all(RankWorker.memory)

    async def _rows(self, method: Any, samples: Sequence[Sample], plan: Plan, *args: Any) -> list[Any]:
        """Call with each rank's own rows of the plan, and no others."""
        return await asyncio.gather(
            *(
                self.executor.call(rank, method, plan, {i: samples[i] for i in plan.rows(rank)}, *args)
                for rank in range(self.num_ranks)
            )
        )

    async def _all(self, method: Any, *args: Any) -> list[Any]:
        return await asyncio.gather(*(self.executor.call(rank, method, *args) for rank in range(self.num_ranks)))


class RolloutGroup:
    """All samplers, with the shape of one: adds routing by session, and continuation of aborted turns."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.ranks = [spec.rank for spec in executor.specs if spec.samples]
        self._next = itertools.cycle(self.ranks)
        self._routes: dict[str, int] = {}

    async def generate(self, request: Request) -> Turn:
        """Sample one turn in full: what an engine aborts is asked again, with the output so far."""
        rank = self._route(request.session)
        parts: list[Turn] = []
        asked = request
        while True:
            turn: Turn = await self.executor.call(rank, RankWorker.generate, asked)
            parts.append(turn)
            if turn.stop_reason != "abort":
                return parts[0] if len(parts) == 1 else join_turns(parts)
            asked = _continued(request, parts)

    def _route(self, session: str) -> int:
        """Sessions go round robin, in order of their first request; a session stays where its cache is."""
        if not session:
            return next(self._next)
        if session not in self._routes:
            if len(self._routes) >= _MAX_SESSIONS:
                self._routes.pop(next(iter(self._routes)))
            self._routes[session] = next(self._next)
        return self._routes[session]

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return await self.executor.call(self.ranks[0], RankWorker.score, ids)

    async def abort(self) -> int:
        """Abort all running requests; `generate` continues them by itself."""
        return sum(await self._all(RankWorker.abort))

    async def reconcile(self, layout: Layout) -> None:
        """Compare the trainer's layout with every sampler's own parameters. Raises: UnloadedParamsError."""
        await self._all(RankWorker.reconcile, layout)

    async def trust_loaded_weights(self) -> None:
        await self._all(RankWorker.trust_loaded_weights)

    async def stats(self) -> list[EngineStats]:
        return await self._all(RankWorker.stats)

    async def _all(self, method: Any, *args: Any) -> list[Any]:
        return await asyncio.gather(*(self.executor.call(rank, method, *args) for rank in self.ranks))


def _continued(request: Request, parts: Sequence[Turn]) -> Request:
    """The same request with everything sampled so far as its prefix."""
    prefix = [] if request.prefix_output is None else [request.prefix_output]
    return dataclasses.replace(request, prefix_output=np.concatenate([*prefix, *(t.output_ids for t in parts)]))


async def sync_weights(trainer: TrainGroup, rollouts: RolloutGroup, layout: Layout) -> list[Ack]:
    """Give every sampler the trainer's weights, as version + 1; raises the version once all have proven it.

    Raises: SyncError naming tensor or stage; the samplers then refuse to generate.
    """
    version = trainer.version + 1
    executor = trainer.executor
    if executor.specs[0].num_rollout_ranks == 0:
        acks: list[Ack] = await asyncio.gather(
            *(executor.call(rank, RankWorker.sync_colocated, layout, version) for rank in rollouts.ranks)
        )
    else:
        begun = await asyncio.gather(
            *(executor.call(r, RankWorker.sync_begin, layout, version) for r in range(trainer.num_ranks))
        )
        header, ring = begun[0]
        if any(other.digests != header.digests for other, _ in begun):
            raise SyncError("train ranks disagree on the digests of the weights they are about to send")
        drains = [asyncio.ensure_future(executor.call(r, RankWorker.sync_drain)) for r in range(1, trainer.num_ranks)]
        receivers = [_RemoteReceiver(executor, rank, ring, layout) for rank in rollouts.ranks]
        acks = await send_weights(header, _refs(executor), receivers)
        await asyncio.gather(*drains)
    trainer.version = version
    return acks


async def _refs(executor: Executor) -> AsyncIterator[BucketRef]:
    """Buckets as rank 0 lays them into shared memory, one at a time."""
    while (ref := await executor.call(0, RankWorker.sync_next)) is not None:
        yield ref


class _RemoteReceiver:
    """A sampler in another process, driven as send_weights drives a WeightReceiver; but what it receives are
    descriptions of buckets, whose payloads lie in shared memory."""

    def __init__(self, executor: Executor, rank: int, ring: str, layout: Layout):
        self.executor, self.rank, self.ring, self.slot_bytes = executor, rank, ring, layout.staging_bytes

    async def reconcile(self, layout: Layout) -> None:
        await self.executor.call(self.rank, RankWorker.reconcile, layout)

    async def begin(self, header: SyncHeader) -> None:
        await self.executor.call(self.rank, RankWorker.begin, header, self.ring, self.slot_bytes)

    async def receive(self, bucket: BucketRef) -> None:
        await self.executor.call(self.rank, RankWorker.receive, bucket)

    async def commit(self) -> Ack:
        return await self.executor.call(self.rank, RankWorker.commit)

    async def cancel(self) -> None:
        await self.executor.call(self.rank, RankWorker.cancel)
