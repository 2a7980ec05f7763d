"""TrainGroup and RolloutGroup: all ranks of a kind behind typed methods. What the loops talk to.

A method's work is done by the RankWorker method of the same name; `executor.call(rank, RankWorker.method, ...)` is
the only way there, whatever the executor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from meshrl.cluster.actors import HeldBoxes, RankWorker, UpdateReport
from meshrl.cluster.executor import Executor
from meshrl.cluster.resident import RowsMessage, SentRows
from meshrl.core.batch import LossFn
from meshrl.core.errors import RankFailure, SyncError, SyncInterrupted
from meshrl.core.types import Metric, Request, Sample, Turn
from meshrl.parallel.mesh import data_index, num_peers
from meshrl.rollout.base import EngineStats
from meshrl.rollout.build import takes_adapters
from meshrl.rollout.continuation import join_turns
from meshrl.sync.layout import Ack, Layout, SyncHeader, SyncMode, make_layout
from meshrl.sync.transaction import SyncOrder, SyncState, make_header, with_reports
from meshrl.train.checkpoint_files import FileFact
from meshrl.train.engine import Role, RowArrays, StepReport
from meshrl.train.plan import Plan, make_plan

P = ParamSpec("P")
T = TypeVar("T")
_TRANSFER_REST = 64  # one part of a transfer of so many is left for its digests: a sync takes less than two transfers
_MAX_SESSIONS = 100_000  # remembered routes; older sessions are routed anew


class TrainGroup:
    """All train ranks. Every method is one collective command, sent to the ranks in the order of the calls.

    lane: held by a command, and by a whole sync, which is many: a command between two of them would meet other
    collectives in some ranks than in others. version: of the last committed sync. is_synced: the weights are those of
    `version`, so no optimizer step has come after it. num_optim_steps: asked for, ever.
    """

    def __init__(self, executor: Executor):
        self.executor = executor
        self.lane = asyncio.Lock()
        self.num_ranks = executor.specs[0].num_train_ranks
        self.cfg = executor.specs[0].train
        self.num_data_ranks = self.num_ranks // num_peers(self.cfg.mesh)
        self._sent = SentRows()
        self.version = -1
        self.is_synced = False
        self.num_optim_steps = 0

    @property
    def changes_mode(self) -> SyncMode:
        """Of a sync that does not send everything."""
        spec = self.executor.specs[0]
        adapters = spec.model.lora.enabled and spec.rollout is not None and takes_adapters(spec.rollout)
        return "adapter" if adapters else "delta"

    def plan(self, samples: Sequence[Sample]) -> Plan:
        """The packing plan of these samples, made here once for all ranks."""
        lengths = [len(s) for s in samples]
        if not self.cfg.share_prompts:
            return make_plan(lengths, self.num_data_ranks, self.cfg.max_tokens_per_microbatch)
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(s.group_id, len(numbers)) for s in samples]
        prefixes = [s.prefix_len if len(s) > s.prefix_len and s.routed_experts is None else 0 for s in samples]
        return make_plan(lengths, self.num_data_ranks, self.cfg.max_tokens_per_microbatch, groups, prefixes)

    async def forward(self, samples: Sequence[Sample], plan: Plan, role: Role) -> list[np.ndarray]:
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
        self.is_synced = False
        self.num_optim_steps += 1
        return (await self._all(RankWorker.optim_step, lr))[0]

    async def layout(self, transfer_bytes: int) -> Layout:
        """What syncs carry, from what the ranks of one replica hold."""
        found: list[HeldBoxes] = await self._all(RankWorker.weights)
        senders = sorted((held for held in found if held.replica == 0), key=lambda held: held.sender)
        first = senders[0]
        limit = transfer_bytes - transfer_bytes // _TRANSFER_REST
        return make_layout(first.tensors, [held.boxes for held in senders], first.tied, limit, first.digest)

    async def model_bytes(self) -> int:
        """Bytes of the model as it is exported."""
        return (await self._all(RankWorker.model_bytes))[0]

    async def export(self, path: str, tokenizer_from: str | None) -> None:
        """Write a folder that `from_pretrained` loads."""
        await self._all(RankWorker.export, path, tokenizer_from)

    async def save(self, folder: str) -> None:
        """Copy the training state to host memory and start to write it into `folder`; training may go on."""
        await self._all(RankWorker.save, folder)

    async def finish_save(self) -> dict[str, FileFact]:
        """Wait until every rank's file is on disk, while other commands go on. Raises: CheckpointError."""
        return dict(await self._each(RankWorker.finish_save))

    async def load(self, folder: str, version: int) -> None:
        """Take over a saved training state, whose weights were `version`: the next sync commits that number again.

        Raises: CheckpointError, before anything is touched.
        """
        self._sent.forget()
        await self._all(RankWorker.load, folder)
        self.version, self.is_synced = version - 1, False

    async def state_bytes(self) -> int:
        """Bytes that a checkpoint takes, all ranks together."""
        return sum(await self._all(RankWorker.state_bytes))

    async def idle(self) -> None:
        """Wait until the ranks have ended what they were asked before."""
        await self._all(RankWorker.state_bytes)

    async def memory(self) -> list[tuple[list[Metric], dict[str, int]]]:
        """Each rank's memory metrics, and its engine's bytes by kind."""
        return await self._all(RankWorker.memory)

    async def _rows(
        self,
        method: Callable[Concatenate[RankWorker, RowsMessage, P], T],
        samples: Sequence[Sample],
        plan: Plan,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call every rank with the rows of its data index; the answer of each index's first rank."""
        async with self.lane:
            messages = self._sent.messages(samples, plan)
            try:
                answers = await asyncio.gather(
                    *(
                        self.executor.call(rank, method, messages[data_index(self.cfg.mesh, rank)], *args, **kwargs)
                        for rank in range(self.num_ranks)
                    )
                )
            except BaseException:
                self._sent.forget()
                raise
            return answers[:: num_peers(self.cfg.mesh)]

    async def _all(self, method: Any, *args: Any) -> list[Any]:
        async with self.lane:
            return await self._each(method, *args)

    async def _each(self, method: Any, *args: Any) -> list[Any]:
        return await asyncio.gather(*(self.executor.call(rank, method, *args) for rank in range(self.num_ranks)))


class RolloutGroup:
    """All samplers, with the shape of one: adds routing by session, continuation of aborted turns, and the
    replacement of ranks that only sample and are lost, from the moment that they are; what they were asked is asked
    again.

    max_restarts: how many are replaced before the failure of the next is raised. note: told of each. on_failure: told
    at once when one can't be replaced. in_flight: what becomes of turns under way when new weights come; each token has
    its version in any case. keep = they stay where they are, and an engine that can't hold them finishes them first;
    abort = they leave their engines, and go on from their last token when the weights are in place; restart = they
    begin anew, so that a turn is of one version.
    """

    def __init__(self, executor: Executor, max_restarts: int = 0):
        self.executor, self.max_restarts = executor, max_restarts
        self.note: Callable[[str], None] = partial(print, file=sys.stderr)
        self.on_failure: Callable[[RankFailure], None] = lambda failure: None
        # Gives a new rank what the others have; False while the trainer is between two versions.
        self.bring_weights: Callable[[int], Awaitable[bool]] | None = None
        self.in_flight: Literal["keep", "abort", "restart"] = "keep"
        self._clear = asyncio.Event()  # not while a sync has made turns leave
        self._clear.set()
        self.synced = asyncio.Event()  # set by each sync; who waits for the next one clears it
        self.mending = asyncio.Lock()  # one replacement or sync at a time: both need all train ranks
        self._mends: dict[RankFailure, asyncio.Task[None]] = {}  # all calls of a lost rank raise the same one
        self._mended: set[RankFailure] = set()
        self._layout: Layout | None = None
        self.num_restarts = self.num_redone = self.num_failed_syncs = 0
        self._told = (0, 0)
        self.ranks = [spec.rank for spec in executor.specs if spec.samples]
        self._next = itertools.cycle(self.ranks)
        self._routes: dict[str, int] = {}

    async def generate(self, request: Request) -> Turn:
        """Sample one turn in full: what an engine aborts is asked again, with the output so far."""
        rank = self._route(request.session)
        parts: list[Turn] = []
        asked = request
        while True:
            await self._free(rank)
            try:
                turn: Turn = await self.executor.call(rank, RankWorker.generate, asked)
            except RankFailure as failure:
                await self.replaced(failure)
                self.num_redone += 1
                continue
            parts.append(turn)
            if turn.stop_reason != "abort":
                return parts[0] if len(parts) == 1 else join_turns(parts)
            async with self.mending:  # of a sync that has lost a sampler: it begins again, and brings this one weights
                pass
            if self.in_flight == "restart":
                parts.clear()
            asked = _continued(request, parts) if parts else request

    async def _free(self, rank: int) -> None:
        """Wait until no sync has made turns leave, and the rank is not being replaced: a new one is there before its
        weights are."""
        while True:
            mends = [mend for failure, mend in self._mends.items() if failure.rank == rank and not mend.done()]
            if self._clear.is_set() and not mends:
                return
            await self._clear.wait()
            for mend in mends:
                await asyncio.shield(mend)

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Around a sync: turns under way are out of their engines, unless they are to be kept."""
        if self.in_flight == "keep":
            yield
            return
        self._clear.clear()
        try:
            await self._where_not_lost(RankWorker.abort)
            yield
        finally:
            self._clear.set()

    def _route(self, session: str) -> int:
        """Sessions go round robin, in order of their first request; a session stays where its cache is."""
        if not session:
            return next(self._next)
        if session not in self._routes:
            if len(self._routes) >= _MAX_SESSIONS:
                self._routes.pop(next(iter(self._routes)))
            self._routes[session] = next(self._next)
        return self._routes[session]

    def forget_sessions(self) -> None:
        """Deal sessions out from the first sampler on again, so that where a prompt runs does not depend on what was
        sampled before: a resumed run places, and so rounds, as one that was never interrupted (P27)."""
        self._next = itertools.cycle(self.ranks)
        self._routes.clear()

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return await self.executor.call(self.ranks[0], RankWorker.score, ids)

    async def abort(self) -> int:
        """Abort all running requests; `generate` continues them by itself."""
        return sum(await self._all(RankWorker.abort))

    async def lend(self) -> int:
        """Free the memory of colocated samplers until the next sync; returns bytes. Nothing may be running."""
        return sum(await self._all(RankWorker.lend))

    async def reconcile(self, layout: Layout) -> None:
        """Compare the trainer's layout with every sampler's own parameters. Raises: UnloadedParamsError."""
        self._layout = layout
        only_train = [spec.rank for spec in self.executor.specs if spec.trains and spec.rank not in self.ranks]
        await asyncio.gather(*(self.executor.call(rank, RankWorker.set_layout, layout) for rank in only_train))
        await self._where_not_lost(RankWorker.set_layout, layout)

    async def trust_loaded_weights(self) -> None:
        async def trust(rank: int) -> bool:
            await self.executor.call(rank, RankWorker.trust_loaded_weights)
            return True

        self.bring_weights = trust
        await self._all(RankWorker.trust_loaded_weights)

    # ---- ranks that are lost

    def mend(self, failure: RankFailure) -> asyncio.Task[None]:
        """Begin to put a new rank with the same weights in the place of the lost one; done once for each failure."""
        if failure not in self._mends:
            self._mends[failure] = asyncio.create_task(self._mend(failure))
            self._mends[failure].add_done_callback(self._tell)
        return self._mends[failure]

    async def replaced(self, failure: RankFailure) -> None:
        """Wait until a new rank stands in the place of the one whose calls raised `failure`. Raises: as `restart`."""
        if self.executor.specs[failure.rank].trains:
            raise failure
        await asyncio.shield(self.mend(failure))  # others wait for it, too

    async def _mend(self, failure: RankFailure) -> None:
        async with self.mending:
            if not await self.restart(failure) or self.bring_weights is None or failure.rank not in self.ranks:
                return  # or it held a device for the sampler of another rank
            if await self.bring_weights(failure.rank):
                return
        self.synced.clear()
        await self.synced.wait()  # which brings its weights, too

    def _tell(self, mend: asyncio.Task[None]) -> None:
        error = None if mend.cancelled() else mend.exception()
        if isinstance(error, RankFailure) and not self.executor.specs[error.rank].trains:  # else it was told already
            self.on_failure(error)

    async def stand_down(self) -> None:
        """Have the ranks that only sample drop their requests and their weights' version: the trainer goes back to an
        earlier one. They sample again after `reconcile` and a full sync; who is lost is replaced then."""
        self.bring_weights = None
        async with self.mending:  # what has begun is finished
            for mend in self._mends.values():
                mend.cancel()
            self._mends.clear()
        await self._where_not_lost(RankWorker.cancel_sync, only_sampling=True)

    async def _where_not_lost(self, method: Any, *args: Any, only_sampling: bool = False) -> None:
        """Call the samplers, and pass over those that only sample and are lost: their successors begin anew."""
        specs = (self.executor.specs[rank] for rank in self.ranks)
        asked = [spec.rank for spec in specs if not (only_sampling and spec.trains)]
        calls = (self.executor.call(rank, method, *args) for rank in asked)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            lost = isinstance(outcome, RankFailure) and outcome.kind != "raised"
            if isinstance(outcome, BaseException) and not (lost and not self.executor.specs[outcome.rank].trains):
                raise outcome

    async def restart(self, failure: RankFailure) -> bool:
        """Put a new rank without weights in the place of a lost one; False if that was done before. `mending` is held.

        Raises: the failure, if its rank trains, or the run has failed as a whole, or max_restarts is used up.
        """
        if failure in self._mended:
            return False
        began, rank = time.monotonic(), failure.rank
        lost, chain = failure, {failure}
        while True:
            if self.executor.specs[lost.rank].trains:
                raise lost
            if self.num_restarts >= self.max_restarts:
                lost.add_note(f"{self.num_restarts} lost ranks were replaced before it (cluster.max_restarts)")
                raise lost
            self.num_restarts += 1
            self.note(f"{str(lost).splitlines()[0]}; replacing it")
            try:
                await self.executor.restart(rank)
                if self._layout is not None and rank in self.ranks:
                    await self.executor.call(rank, RankWorker.set_layout, self._layout)
            except RankFailure as again:
                if again is lost:
                    raise
                lost = again
                chain.add(again)
            else:
                self._mended |= chain
                self.note(f"rank {rank} is back after {time.monotonic() - began:.1f} s")
                return True

    def losses(self) -> list[Metric]:
        """Ranks replaced and requests asked again since the last call."""
        (restarts, redone), self._told = self._told, (self.num_restarts, self.num_redone)
        return [
            Metric(name="rollout/ranks_replaced", sum=self.num_restarts - restarts, reduce="sum", unit="ranks"),
            Metric(name="rollout/requests_redone", sum=self.num_redone - redone, reduce="sum", unit="requests"),
        ]

    # ----

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
    async with rollouts.drained():
        version = trainer.version + 1
        async with rollouts.mending:
            acks = await _send_to(rollouts.ranks, trainer, rollouts, layout, version)

        async def bring(rank: int) -> bool:
            return bool(await _send_to([rank], trainer, rollouts, layout, version, lambda: trainer.is_synced))

        rollouts.bring_weights = bring
        trainer.version, trainer.is_synced = version, True
        rollouts.synced.set()
        return acks


async def _send_to(
    ranks: Sequence[int],
    trainer: TrainGroup,
    rollouts: RolloutGroup,
    layout: Layout,
    version: int,
    may: Callable[[], bool] = lambda: True,
) -> list[Ack]:
    """Once more from the start, to all of them, when a sampler is lost on the way and can be replaced. `mending` is
    held. may: whether the weights are still those of this version, asked when no command can move them; if not, nothing
    is sent, and none acknowledges."""
    while True:
        occasion = f"{[*ranks]}, {rollouts.num_restarts} replaced, {rollouts.num_failed_syncs} syncs cancelled"
        try:
            async with trainer.lane:
                if not may():
                    return []
                return await _sync(trainer, ranks, layout, version, hashlib.sha256(occasion.encode()).hexdigest()[:16])
        except BaseException as error:
            rollouts.num_failed_syncs += 1
            lost = error if isinstance(error, RankFailure) else error.__cause__
            if not isinstance(lost, RankFailure):
                raise
            await rollouts.restart(lost)


async def _sync(trainer: TrainGroup, samplers: Sequence[int], layout: Layout, version: int, occasion: str) -> list[Ack]:
    """One call for each rank that sends, receives or both. The first that fails has all others cancelled."""
    executor = trainer.executor
    ranks = sorted({*range(trainer.num_ranks), *samplers})
    found = await asyncio.gather(*(executor.call(rank, RankWorker.sync_state, occasion) for rank in ranks))
    states: dict[int, SyncState] = dict(zip(ranks, found, strict=True))
    header = make_header(layout, version, list(states.values()), trainer.changes_mode)
    orders = {
        rank: _order(header, occasion, rank, states, samplers)
        for rank, state in states.items()
        if state.sender is not None or rank in samplers
    }
    calls = {rank: asyncio.ensure_future(executor.call(rank, RankWorker.sync, order)) for rank, order in orders.items()}
    try:
        await asyncio.wait(calls.values(), return_when=asyncio.FIRST_EXCEPTION)
        outcomes = [call.result() for call in calls.values()]
        acks, reports = ([part for part in parts if part is not None] for parts in zip(*outcomes, strict=True))
        return with_reports(acks, reports, header)
    except BaseException as error:
        cancelling = (executor.call(rank, RankWorker.cancel_sync) for rank in calls)
        ended = await asyncio.gather(*cancelling, return_exceptions=True)
        failures = await asyncio.gather(*calls.values(), return_exceptions=True)
        if not isinstance(error, Exception):  # this task was cancelled; what the ranks report then only follows from it
            raise
        cause = _cause([failure for failure in failures if isinstance(failure, Exception)]) or error
        for rank, outcome in zip(calls, ended, strict=True):
            if isinstance(outcome, BaseException):
                cause.add_note(f"rank {rank} could not be cancelled either: {outcome!r}")
        if isinstance(cause, SyncError):
            raise cause from cause.__cause__
        raise SyncError(f"the sync of version {version} failed: {type(cause).__name__}: {cause}") from cause


def _cause(failures: Sequence[Exception]) -> Exception | None:
    """Of the failures of several ranks that which made the others fail: a lost rank, then what is no interruption."""
    lost = [failure for failure in failures if isinstance(failure, RankFailure)]
    own = [failure for failure in failures if not isinstance(failure, SyncInterrupted)]
    return next(iter([*lost, *own, *failures]), None)


def _order(
    header: SyncHeader, occasion: str, rank: int, states: Mapping[int, SyncState], samplers: Sequence[int]
) -> SyncOrder:
    """What this rank has to know. Train ranks that sample receive from the senders of their own replica."""
    own = states[rank]
    peers = {
        other: state
        for other, state in states.items()
        if state.sender is not None and other != rank and (own.sender is None or state.replica == own.replica)
    }
    receivers = [other for other in samplers if other != rank and (states[other].sender is None or other in peers)]
    receives = rank in samplers
    return SyncOrder(
        header=header,
        occasion=occasion,
        senders={s.sender: s.address for s in peers.values() if s.address and s.sender is not None} if receives else {},
        number=samplers.index(rank) if receives else 0,
        num_receivers=len(receivers) if own.sender is not None else len(samplers),
    )
