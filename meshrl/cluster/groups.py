"""TrainGroup and RolloutGroup: all ranks of a kind behind typed methods. The loops use these two classes.

The methods of RankWorker do the work; `executor.call(rank, RankWorker.method, ...)` is the only way to call them, with
every executor.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from meshrl.cluster.actors import RankWorker, UpdateReport
from meshrl.cluster.executor import Executor, ignored
from meshrl.cluster.replacement import Replacement
from meshrl.cluster.routes import Routes
from meshrl.cluster.rows import PlannedRows, RowsMessage
from meshrl.config.train import MOST_TOKENS
from meshrl.core.batch import LossFn
from meshrl.core.errors import RankFailure
from meshrl.core.terminal import print_message
from meshrl.core.types import POLICY, Metric, Request, Sample, Turn
from meshrl.plan.decisions import DEVICE_BUCKET_BYTES, HOST_BUCKET_BYTES
from meshrl.plan.ranks import coordinates
from meshrl.rollout.base import join_turns
from meshrl.sync.layout import Layout, SyncMode, make_layout
from meshrl.train.batch_plan import make_batch_plan
from meshrl.train.checkpoint_files import FileFact
from meshrl.train.engine import StepReport

P = ParamSpec("P")
T = TypeVar("T")
InFlight = Literal["keep", "abort", "restart"]
_DIGEST_PART = 64  # 1/64 of the bytes of the transfers is reserved for their digests


class TrainGroup:
    """All train ranks. A method that needs the ranks is one collective command, sent to them in the order of the
    calls. Roles are named (RoleSpec.name).

    command_lock: held during a command, and during all commands of a sync: a command between two of them could run
    between different collectives in different ranks. version: the version of the last committed sync. is_synced: the
    policy's weights are those of `version`. num_optim_steps: the number of optimizer steps of the policy that were
    requested so far. progress: called with how far the ranks are with the micro-batches of a command.
    """

    def __init__(self, executor: Executor, progress: Callable[[str], None] = ignored):
        self.executor, self._progress = executor, progress
        self._num_batches = 0  # of each rank in the running command
        self.command_lock = asyncio.Lock()
        self.num_ranks = executor.specs[0].num_train_ranks
        self.cfg = executor.specs[0].train
        self.compute_dtype = executor.specs[0].model.dtype
        shape = self.cfg.mesh_shape(self.num_ranks)
        self.coordinates = [coordinates(shape, rank) for rank in range(self.num_ranks)]
        self.num_data_ranks = self.coordinates[0].num_data
        self._budget = (self.cfg.max_tokens_per_microbatch or MOST_TOKENS) * self.coordinates[0].num_ulysses
        self.version = -1
        self.is_synced = False
        self.num_optim_steps = 0

    @property
    def changes_mode(self) -> SyncMode:
        """The mode of a sync that does not send all weights."""
        spec = self.executor.specs[0]
        lora = spec.model.lora
        adapters = lora.enabled and spec.rollout is not None and spec.rollout.takes_adapters(lora)
        return "adapter" if adapters else "delta"

    def plan_rows(self, samples: Sequence[Sample], scored: Collection[int] = ()) -> PlannedRows:
        """Make the batch plan of these samples, once for all ranks and all commands. scored: the rows without a
        gradient."""
        lengths = [len(s) for s in samples]
        groups = prefixes = None
        if self.cfg.share_prompts:
            numbers: dict[str, int] = {}
            groups = [numbers.setdefault(s.group_id, len(numbers)) for s in samples]
            prefixes = [s.prefix_len if len(s) > s.prefix_len and s.routed_experts is None else 0 for s in samples]
        batch_plan = make_batch_plan(lengths, self.num_data_ranks, self._budget, groups, prefixes, scored)
        return PlannedRows(samples=[*samples], batch_plan=batch_plan)

    async def forward(self, rows: PlannedRows, role: str) -> list[np.ndarray]:
        """Logprobs of all samples under the engine of this role, in their order; float32[T] each."""
        parts = await self._rows(RankWorker.forward, rows, role)
        by_row = {i: array for part in parts for i, array in part.items()}
        return [by_row[i] for i in range(len(rows.samples))]

    async def forward_backward(self, rows: PlannedRows, role: str, loss: LossFn, values: bool = False) -> UpdateReport:
        """Add the gradient of these rows; returns the metrics of all ranks. values: whether the report has the
        trainer's values of each token."""
        reports = await self._rows(RankWorker.forward_backward, rows, role, loss, values)
        return UpdateReport(
            metrics=[m for r in reports for m in r.metrics],
            mismatch={i: row for r in reports for i, row in r.mismatch.items()},
            values={i: row for r in reports for i, row in r.values.items()},
        )

    async def optim_step(self, role: str, lr: float) -> StepReport:
        """Update the weights; returns the first rank's report, with `not_finite` of the first rank that has any."""
        if role == POLICY.name:
            self.is_synced = False
            self.num_optim_steps += 1
        reports = await self._all(lambda rank: self.executor.call(rank, RankWorker.optim_step, role, lr))
        bad = next((report.not_finite for report in reports if report.not_finite), "")
        return dataclasses.replace(reports[0], not_finite=bad)

    async def layout(self, transfer_bytes: int | None = None) -> Layout:
        """The layout of syncs, made from the boxes of one replica's ranks. transfer_bytes: of all senders together;
        None = as the trainers' device decides."""
        of_ranks = await self._all(lambda rank: self.executor.call(rank, RankWorker.weights))
        senders = of_ranks[: self.coordinates[0].num_senders]  # the ranks of replica 0, sorted by sender
        first = senders[0]
        if transfer_bytes is None:
            transfer_bytes = HOST_BUCKET_BYTES if first.digest == "xxh3" else DEVICE_BUCKET_BYTES
        limit = transfer_bytes - transfer_bytes // _DIGEST_PART
        return make_layout(first.tensors, [own.boxes for own in senders], first.tied, limit, first.digest)

    async def model_bytes(self) -> int:
        """Bytes of the exported model."""
        return (await self._all(lambda rank: self.executor.call(rank, RankWorker.model_bytes)))[0]

    async def compute_notes(self) -> list[str]:
        """How the ranks compute, for the run's output."""
        return (await self._all(lambda rank: self.executor.call(rank, RankWorker.compute_notes)))[0]

    async def export(self, path: str, tokenizer_from: str | None, weights: bool = True) -> float | None:
        """Write a folder that `from_pretrained` loads; arguments and result: see `TrainEngine.export`."""
        arguments = path, tokenizer_from, weights
        return (await self._all(lambda rank: self.executor.call(rank, RankWorker.export, *arguments)))[0]

    async def save(self, folder: str, continues: bool = True) -> None:
        """Start to write the training state into `folder`; continues: see `TrainEngine.save`."""
        await self._all(lambda rank: self.executor.call(rank, RankWorker.save, folder, continues))

    async def finish_save(self) -> dict[str, FileFact]:
        """Wait until every rank's files are on disk; other commands may run. Raises: CheckpointError."""
        of_ranks = await self._each(lambda rank: self.executor.call(rank, RankWorker.finish_save))
        return {name: fact for files in of_ranks for name, fact in files.items()}

    async def load(self, folder: Path | None, version: int) -> None:
        """Load a saved training state; None: new ranks have the weights of model.path already. The weights had this
        version: the next sync commits that number again.

        Raises: CheckpointError, before anything is changed.
        """
        if folder is not None:
            await self._all(lambda rank: self.executor.call(rank, RankWorker.load, str(folder)))
        self.version, self.is_synced = version - 1, False

    async def state_bytes(self) -> int:
        """Bytes of a checkpoint, summed over all ranks."""
        return sum(await self._all(lambda rank: self.executor.call(rank, RankWorker.state_bytes)))

    async def memory(self) -> list[Metric]:
        """The memory metrics of all ranks."""
        of_ranks = await self._all(lambda rank: self.executor.call(rank, RankWorker.memory))
        return [metric for metrics in of_ranks for metric in metrics]

    async def _rows(
        self,
        method: Callable[Concatenate[RankWorker, RowsMessage, P], T],
        rows: PlannedRows,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call every rank with the rows of its data index; returns the answer of each index's first rank."""
        messages = [rows.message(index) for index in range(self.num_data_ranks)]

        def call(rank: int) -> Awaitable[T]:
            message = messages[self.coordinates[rank].data_index]
            self._num_batches = len(message.micro_batches)
            return self.executor.call(rank, method, message, *args, **kwargs)

        answers = await self._all(call)
        return [answer for answer, own in zip(answers, self.coordinates, strict=True) if own.is_first_peer]

    def show_batches(self, count: int) -> None:
        if self._num_batches > 1:
            self._progress(f"{count} of {self._num_batches} micro-batches")

    async def _all(self, call: Callable[[int], Awaitable[T]]) -> list[T]:
        async with self.command_lock:
            return await self._each(call)

    async def _each(self, call: Callable[[int], Awaitable[T]]) -> list[T]:
        return await asyncio.gather(*map(call, range(self.num_ranks)))


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

    async def reconcile(self, layout: Layout) -> None:
        """Compare the trainer's layout with every sampler's own parameters. Raises: UnloadedParamsError."""
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
