"""TrainGroup: all train ranks behind typed methods.

The methods of RankWorker do the work; `executor.call(rank, RankWorker.method, ...)` is the only way to call them, with
every executor.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from meshrl.cluster.actors import RankWorker, UpdateReport
from meshrl.cluster.executor import Executor, ignored
from meshrl.cluster.rows import PlannedRows, RowsMessage
from meshrl.config.train import MOST_TOKENS
from meshrl.core.batch import LossFn
from meshrl.core.types import POLICY, Metric, Sample
from meshrl.plan.decisions import DEVICE_BUCKET_BYTES, HOST_BUCKET_BYTES
from meshrl.plan.ranks import coordinates
from meshrl.sync.layout import Layout, SyncMode, make_layout
from meshrl.train.batch_plan import make_batch_plan
from meshrl.train.checkpoint_files import FileFact
from meshrl.train.engine import RowArrays, StepReport

P = ParamSpec("P")
T = TypeVar("T")
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

    def plan_rows(
        self, samples: Sequence[Sample], scored: Collection[int] = (), unscored: Collection[int] = ()
    ) -> PlannedRows:
        """Make the batch plan of these samples, once for all ranks and all commands. scored, unscored: see
        `make_batch_plan`."""
        lengths = [len(s) for s in samples]
        groups = prefixes = None
        if self.cfg.share_prompts:
            numbers: dict[str, int] = {}
            groups = [numbers.setdefault(s.group_id, len(numbers)) for s in samples]
            prefixes = [s.prefix_len if len(s) > s.prefix_len and s.routed_experts is None else 0 for s in samples]
        batch_plan = make_batch_plan(lengths, self.num_data_ranks, self._budget, groups, prefixes, scored, unscored)
        return PlannedRows(samples=[*samples], batch_plan=batch_plan)

    async def forward(self, rows: PlannedRows, role: str) -> RowArrays:
        """Logprobs of the samples under the engine of this role, by index in their order, without those that are not
        scored; float32[T] each."""
        parts = await self._rows(RankWorker.forward, rows, role)
        by_row = {i: array for part in parts for i, array in part.items()}
        return {i: by_row[i] for i in sorted(by_row)}

    async def forward_backward(self, rows: PlannedRows, role: str, loss: LossFn, values: bool = False) -> UpdateReport:
        """Add the gradient of these rows; returns the metrics of all ranks. values: whether the report has the
        trainer's values of each token."""
        reports = await self._rows(RankWorker.forward_backward, rows, role, self.version, loss, values)
        return UpdateReport(
            metrics=[m for r in reports for m in r.metrics],
            mismatch={i: row for r in reports for i, row in r.mismatch.items()},
            logprobs=[digest for r in reports for digest in r.logprobs],
            values={i: row for r in reports for i, row in r.values.items()},
        )

    async def optim_step(self, role: str, lr: float, digests: bool = False) -> StepReport:
        """Update the weights; returns the first rank's report, with `not_finite` of the first rank that has any, and
        the digests of all. digests: see `TrainEngine.optim_step`."""
        if role == POLICY.name:
            self.is_synced = False
            self.num_optim_steps += 1
        reports = await self._all(lambda rank: self.executor.call(rank, RankWorker.optim_step, role, lr, digests))
        bad = next((report.not_finite for report in reports if report.not_finite), "")
        shards = [own for report in reports for own in report.shards]
        return dataclasses.replace(reports[0], not_finite=bad, shards=shards)

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
        """Wait until every rank's files are on disk; other commands may run."""
        of_ranks = await self._each(lambda rank: self.executor.call(rank, RankWorker.finish_save))
        return {name: fact for files in of_ranks for name, fact in files.items()}

    async def load(self, folder: Path | None, version: int) -> None:
        """Load a saved training state; None: new ranks have the weights of model.path already. The weights had this
        version: the next sync commits that number again. If it fails, nothing is changed."""
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
