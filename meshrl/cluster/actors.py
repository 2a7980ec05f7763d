"""RankWorker: what one rank holds (train engine, reference, sampler) and the commands it takes.

One thread runs everything, so the train lane and the sampler never run at the same time. Methods that are collective
say so; the controller sends them to all train ranks in the same order.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshrl.algo.mismatch import sampler_mismatch
from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.rendezvous import open_store
from meshrl.config.rollout import RolloutConfig
from meshrl.core.batch import LossFn
from meshrl.core.device import (
    dist_backend,
    empty_cache,
    keep_freed_memory,
    local_device,
    memory_stats,
    set_threads,
    wire_device,
)
from meshrl.core.errors import CapabilityError
from meshrl.core.types import Metric, Request, Sample, Turn
from meshrl.monitor.memory import memory_metrics
from meshrl.parallel.mesh import build_mesh, resolve_shape
from meshrl.rollout.base import EngineStats, RolloutEngine
from meshrl.rollout.build import build_rollout_engine, takes_adapters
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.sync.group_ring import Seat
from meshrl.sync.manifest import Ack, Layout, SyncHeader
from meshrl.sync.routes import View, name_here, open_view
from meshrl.sync.send import send_weights
from meshrl.sync.shards import SendReport
from meshrl.sync.transport import BucketRef
from meshrl.train.checkpoint_files import FileFact
from meshrl.train.engine import ForwardBackward, RowArrays, StepReport, TrainEngine
from meshrl.train.outgoing import RING_SLOTS, Outgoing, Source, Transport
from meshrl.train.packing import pack
from meshrl.train.plan import Plan

Rows = dict[int, Sample]  # step-wide row index -> sample


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """A rank's share of one forward_backward: the loss's metrics, and how far the re-score is from what was sampled."""

    metrics: list[Metric]
    mismatch: list[Metric]


class RankWorker:
    """Build with a spec, then `start()`."""

    def __init__(self, spec: WorkerSpec):
        self.spec = spec
        self.device = torch.device("cpu")
        self.policy: TrainEngine | None = None
        self.reference: TrainEngine | None = None
        self.sampler: RolloutEngine | None = None
        self._ring_views: list[View] = []  # of the senders, in the order of their streams
        self._outgoing: Outgoing | None = None

    def start(self) -> str:
        """Join the process group and build this rank's engines (collective over train ranks). Returns the device."""
        spec = self.spec
        set_threads(spec.num_local_ranks)
        self.device = local_device(spec.rank)
        if spec.trains:
            dist.init_process_group(
                dist_backend(self.device),
                store=open_store(spec.rendezvous, spec.num_train_ranks, spec.timeout_s),
                rank=spec.rank,
                world_size=spec.num_train_ranks,
                timeout=datetime.timedelta(seconds=spec.collective_timeout_s),
            )
            shape = resolve_shape(spec.train.mesh, spec.num_train_ranks, spec.train.sharding_strategy)
            mesh = build_mesh(shape, self.device.type)
            self.policy = TrainEngine.build(spec.model, spec.train, mesh, "policy")
            if spec.reference and not spec.model.lora.enabled:  # else it is the policy without its adapters
                self.reference = TrainEngine.build(spec.model, spec.train, mesh, "reference")
            keep_freed_memory(self.device)
        if spec.samples and spec.rollout is not None:
            self.sampler = build_rollout_engine(spec.model, spec.rollout, self.device, spec.rank, spec.stop_token_ids)
            if spec.trains and spec.rollout.release_memory and not self.sampler.capabilities.release:
                raise CapabilityError(
                    f"rollout.release_memory is on, but engine {spec.rollout.engine} of rank {spec.rank} can't give "
                    "its memory up: an SGLang server can on a GPU; one that runs already needs --enable-memory-saver"
                )
        return str(self.device)

    # ---- train lane (collective)

    def layout(self, bucket_bytes: int) -> Layout:
        """What the syncs of this run carry: each rank its own shard."""
        cfg = self.spec.rollout
        merged = cfg is not None and not takes_adapters(cfg)
        return self._trainer().layout(bucket_bytes, merged=merged)

    def forward(self, plan: Plan, rows: Rows, role: str) -> RowArrays:
        """Logprobs of this rank's rows under the policy or the reference (collective)."""
        batches = self._batches(plan, rows)
        if role == "policy" or self.spec.model.lora.enabled:
            return self._trainer().forward(batches, adapter=role == "policy")[0]
        if self.reference is None:
            raise ValueError(f"rank {self.spec.rank} has no {role} engine")
        return self.reference.forward(batches)[0]

    def forward_backward(self, plan: Plan, rows: Rows, loss: LossFn) -> UpdateReport:
        """Gradient of this rank's micro-batches of the plan (collective)."""
        result = self._trainer().forward_backward(self._batches(plan, rows), loss)
        return UpdateReport(metrics=result.metrics, mismatch=_mismatch(result, rows))

    def optim_step(self, lr: float) -> StepReport:
        return self._trainer().optim_step(lr)

    def export(self, path: str, tokenizer_from: str | None) -> None:
        self._trainer().export(path, tokenizer_from)

    # ---- checkpoints

    def save(self, folder: str) -> None:
        """Copy the training state to host memory and start to write it (collective)."""
        self._trainer().save(folder)

    async def finish_save(self) -> tuple[str, FileFact]:
        """Wait for the file that `save` began, while other commands go on; its name, size and hash."""
        return await asyncio.to_thread(self._trainer().finish_save)

    def load(self, folder: str) -> None:
        """Take over the training state of a checkpoint (collective)."""
        self._trainer().load(folder)

    def state_bytes(self) -> int:
        return self._trainer().state_bytes()

    def _batches(self, plan: Plan, rows: Rows) -> list[Any]:
        hashes: list[Any] = [None] * self.spec.num_train_ranks
        dist.all_gather_object(hashes, plan.hash)
        if len(set(hashes)) > 1:
            raise ValueError(f"ranks hold different packing plans: {hashes}")
        return [
            pack([rows[i] for i in micro], micro, self.device, plan.hash, self.spec.train.share_prompts)
            for micro in plan.micro_batches[self.spec.rank]
        ]

    # ---- weights

    async def sync_colocated(self, layout: Layout, version: int) -> tuple[Ack | None, SendReport]:
        """Load each bucket of all ranks into this rank's own sampler (collective). A rank whose device serves another's
        sampler only gives its shard."""
        trainer, sampler, ack = self._trainer(), self.sampler, None
        held = None if sampler is None else sampler.stats().version
        if self._lends:
            self._give_back()
            if sampler is not None:
                await sampler.restore({"weights"})
        targets = sampler.targets() if isinstance(sampler, EmbeddedEngine) else None
        header, buckets = self._out().beside(layout, version, held, targets)
        if sampler is None:
            for _ in buckets:
                pass
        else:
            (ack,) = await send_weights(header, buckets, [sampler])
        if self._lends:
            self._give_back()
            if sampler is not None:
                await sampler.restore({"kv_cache"})
        trainer.version = version
        return ack, self._out().report()

    def _give_back(self) -> None:
        """Memory that torch only keeps goes back to the device, on all ranks, for samplers may be other processes and
        lie on the devices of several (collective)."""
        empty_cache(self.device)
        dist.barrier()

    def shard_source(self, layout: Layout, occasion: str, num_receivers: int) -> Source:
        """Where samplers in other processes find this rank's shard, and what it could send the changes since."""
        return self._out().begin(layout, occasion, num_receivers)

    def shard_next(self, version: int, changes: bool) -> BucketRef | SendReport:
        """Put the shard's next bucket on its way and say where it is; after the last, what was sent."""
        sent = self._out().next(version, changes)
        if isinstance(sent, SendReport):
            self._trainer().version = version
        return sent

    async def reconcile(self, layout: Layout) -> None:
        await self._sampler().reconcile(layout)

    async def begin(self, header: SyncHeader, rings: Sequence[tuple[int, str]], slot_bytes: int, seat: Seat) -> None:
        """Open the senders' transports, and begin. rings: (rank, name) of each sender."""
        here = self.spec.rank // self.spec.num_local_ranks
        names = [name_here(name, rank // self.spec.num_local_ranks == here) for rank, name in rings]
        if names != [view.name for view in self._ring_views]:
            self._close_views()  # of senders that were replaced
            device, timeout_s = wire_device(self.device), self.spec.deadline_s("sync") / 2
            for name in names:
                self._ring_views.append(open_view(name, RING_SLOTS, slot_bytes, seat, device, timeout_s))
        await self._sampler().begin(header)

    async def receive(self, ref: BucketRef) -> None:
        """Load a bucket that lies in its sender's memory."""
        assert self._ring_views, "receive comes after begin"
        await self._sampler().receive(self._ring_views[ref.stream].bucket(ref))

    async def commit(self) -> Ack:
        return await self._sampler().commit()

    async def cancel(self) -> None:
        """Give up, and leave the senders' transports, so that none of them waits for this rank."""
        self._close_views()
        await self._sampler().cancel()

    def trust_loaded_weights(self) -> None:
        """Sample with the weights of the folder, as they were loaded (evaluation without a trainer)."""
        self._sampler().trust_loaded_weights()

    # ---- sampler

    async def generate(self, request: Request) -> Turn:
        return await self._sampler().generate(request)

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return await self._sampler().score(ids)

    async def abort(self) -> int:
        return await self._sampler().abort()

    async def lend(self) -> int:
        """Free the sampler's weights and caches for the trainer beside it, until the next sync; returns bytes."""
        return await self._sampler().release({"weights", "kv_cache"})

    def stats(self) -> EngineStats:
        return self._sampler().stats()

    # ---- rest

    def memory(self) -> tuple[list[Metric], dict[str, int]]:
        """This process's memory metrics, and the train engine's bytes by kind."""
        metrics = memory_metrics(own_name=f"rank_{self.spec.rank}")
        metrics += [
            Metric(name=f"memory/device_{name}", sum=value, reduce="max", unit="bytes")
            for name, value in memory_stats(self.device).items()
        ]
        return metrics, self.policy.memory() if self.policy else {}

    async def stop(self) -> None:
        """Free what the rank holds."""
        if self.sampler is not None:
            await self.sampler.close()
        if self._outgoing is not None:
            self._outgoing.close()
        self._close_views()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _close_views(self) -> None:
        for view in self._ring_views:
            view.close()
        self._ring_views = []

    def _out(self) -> Outgoing:
        if self._outgoing is None:
            spec = self.spec
            assert spec.rollout is not None, "weights are for who samples"
            self._outgoing = Outgoing(
                self._trainer(),
                _transport(spec.rollout),
                keep_base=spec.rollout.sync_mode == "delta",
                one_machine=spec.nodes == 1,
                address=spec.address,
                timeout_s=spec.deadline_s("sync") / 2,  # so that who waits in vain says so before it is called silent
            )
        return self._outgoing

    def _trainer(self) -> TrainEngine:
        if self.policy is None:
            raise ValueError(f"rank {self.spec.rank} does not train")
        return self.policy

    @property
    def _lends(self) -> bool:
        return self.spec.rollout is not None and self.spec.rollout.release_memory

    def _sampler(self) -> RolloutEngine:
        if self.sampler is None:
            raise ValueError(f"rank {self.spec.rank} does not sample")
        return self.sampler


def _transport(cfg: RolloutConfig) -> Transport:
    folder = Path(cfg.sync_folder) if cfg.sync_transport == "files" and cfg.sync_folder is not None else None
    return Transport(folder=folder, broadcast=cfg.sync_transport == "broadcast")


def _mismatch(result: ForwardBackward, rows: Rows) -> list[Metric]:
    """Re-score against what was sampled, over the masked tokens of this rank's rows."""
    picked = [(rows[i], logprobs) for i, logprobs in result.logprobs.items()]
    if not picked:
        return []
    return sampler_mismatch(
        torch.from_numpy(np.concatenate([s.rollout_logprobs for s, _ in picked])),
        torch.from_numpy(np.concatenate([logprobs for _, logprobs in picked])),
        torch.from_numpy(np.concatenate([s.mask for s, _ in picked])),
        [len(s) for s, _ in picked],
    )
