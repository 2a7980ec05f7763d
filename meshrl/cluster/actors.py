"""RankWorker: one rank's train engine, reference model and sampler, and the commands that the rank accepts.

One thread runs all commands, so training and sampling never run at the same time; only files are written by others. The
docstring of a collective method states that it is collective; the controller sends such commands to all train ranks in
the same order.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshrl.algo.mismatch import row_mismatch
from meshrl.cluster.executor import WorkerSpec, ignored, phase
from meshrl.cluster.rank_sync import RankSync, SharedDevice
from meshrl.cluster.rows import RowsMessage
from meshrl.core.batch import Batch, LossFn
from meshrl.core.device import (
    device_name,
    dist_backend,
    free_bytes,
    has_own_memory,
    keep_few_primitives,
    keep_freed_memory,
    local_device,
    memory_stats,
    reset_peak_memory,
    return_freed_memory,
    seed_generators,
    set_threads,
)
from meshrl.core.errors import CapabilityError, ConfigError
from meshrl.core.types import POLICY, REFERENCE, Metric, Request, Sample, Turn
from meshrl.model.attention import attention_text
from meshrl.model.costs import peak_flops
from meshrl.model.facts import model_facts
from meshrl.model.recipe import DTYPES
from meshrl.model.stream import LoadedWeights
from meshrl.monitor.metrics import memory_metrics
from meshrl.monitor.recorder import PROFILE_FILE, TRACED, recorder, write_rank
from meshrl.monitor.status import RankProcess
from meshrl.parallel.mesh import build_mesh
from meshrl.parallel.timing import settle
from meshrl.plan.disk_use import size_text
from meshrl.plan.memory import ERROR, LIBRARIES, MEASURED
from meshrl.process.diagnosis import family, own_memory
from meshrl.rollout.base import RolloutEngine
from meshrl.rollout.build import build_rollout_engine
from meshrl.sync.digest import DigestKind, array_digest, kind_for
from meshrl.sync.layout import Ack, Box, Layout
from meshrl.sync.sender import SendReport
from meshrl.sync.transaction import SyncOrder, SyncState
from meshrl.train.checkpoint import Tensors
from meshrl.train.checkpoint_files import FileFact
from meshrl.train.engine import RowArrays, StepReport, TrainEngine
from meshrl.train.state import reference_digest

NOT_TINY = 50 << 20  # bytes of a model for which a run prints that another dtype is faster
SHARED = (
    "Trainer and sampler share the weights that LoRA does not train. These stay on the device, also with "
    "train.param_offload and rollout.release_memory"
)
MUCH_SLOWER = 1.5  # other work on the machine changes the ratio of two measurements by up to 1.3
Rows = dict[int, Sample]  # step-wide row index -> sample


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """A rank's share of one forward_backward: the loss's metrics. mismatch: for each row, how far the policy's logprobs
    are from the sampler's (algo/mismatch.py); empty for another role. logprobs: a digest of those of its rows, in their
    order. values: if requested, each row's logprobs and entropies of its trained tokens, float32[2, n]."""

    metrics: list[Metric]
    mismatch: dict[int, np.ndarray]
    logprobs: list[int]
    values: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class RankBoxes:
    """The part of the weights that one rank holds. tensors: {name: (shape, dtype as sent)}. tied: alias -> the name
    that is sent for it. digest: the faster one on its device."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    boxes: list[Box]
    tied: dict[str, str]
    digest: DigestKind


class RankWorker:
    """Construct it with a spec, then call `start()`. on_batches: called after each micro-batch of a command, with the
    number of those that have ended."""

    def __init__(self, spec: WorkerSpec, on_batches: Callable[[int], None] = ignored):
        self.spec, self._on_batches = spec, on_batches
        self.device = torch.device("cpu")
        self.engines: dict[str, TrainEngine] = {}  # by role; with LoRA, the reference is the policy without adapters
        self.sampler: RolloutEngine | None = None
        self._memory = SharedDevice(spec, self.device, self.engines, None)
        self._weight_sync: RankSync | None = None
        self._profiler: torch.profiler.profile | None = None
        self.recorder: Any = None  # the server of its flight recorder, in a rank that trains on an accelerator
        self._flops = 0.0  # of this rank's share of the training since `memory`
        self._num_batches = 0

    @phase("load")
    def start(self) -> list[RankProcess]:
        """Seed the generators, join the process group and build this rank's engines (collective over train ranks).
        Returns this process and those that it has started, such as a server."""
        recorder.clear()
        recorder.measure = self._memory_now
        set_threads(self.spec.num_local_ranks, self.spec.num_threads)
        keep_few_primitives()
        self.device = local_device(self.spec.local_rank)
        spec = self.spec
        if spec.rollout is not None:  # release_memory: true or false
            releases = spec.num_rollout_ranks == 0 and spec.rollout.releases(has_own_memory(self.device))
            spec = replace(spec, rollout=spec.rollout.model_copy(update={"release_memory": releases}))
        self.spec = spec
        need = 0 if spec.memory is None else spec.memory.least
        free = free_bytes(self.device) if need else None  # the device is asked for nothing without a plan
        if free is not None and need * (1 - ERROR) > free:
            raise ConfigError(
                f"by its plan, rank {spec.rank} needs {size_text(need)} of its device, of which {size_text(free)} are "
                "free. `meshrl plan CONFIG --gpu-memory SIZE` prints the parts of each phase and what lowers them; "
                "run.ignore_plan=true starts the run all the same"
            )
        seed_generators(spec.seed, spec.rank)
        facts = None
        if spec.trains:
            settle(self.device)
            dist.init_process_group(
                dist_backend(self.device),
                store=_open_store(spec),
                rank=spec.rank,
                world_size=spec.num_train_ranks,
                timeout=datetime.timedelta(seconds=spec.collective_timeout_s),
                # Without it, NCCL makes a communicator for each pair of ranks of which one sends to the other.
                device_id=None if self.device.type == "cpu" else self.device,
            )
            mesh = build_mesh(spec.train.mesh_shape(spec.num_train_ranks), self.device.type)
            facts = loaded = model_facts(spec.model.path, spec.model.attn_implementation)
            for role in spec.roles:
                if role == REFERENCE and spec.model.lora.enabled:
                    continue
                engine = self.engines[role.name] = TrainEngine.build(spec.model, spec.train, mesh, role, loaded)
                engine.on_batch = self._batch_ended
                if DTYPES[spec.train.master_dtype].itemsize >= DTYPES[spec.model.dtype].itemsize:  # else it has rounded
                    loaded = replace(facts, weights=LoadedWeights(engine.model.lm))
        if spec.samples and spec.rollout is not None:
            self.sampler = build_rollout_engine(
                spec.model,
                spec.rollout,
                self.device,
                spec.rank,
                spec.stop_token_ids,
                spec.logs,
                facts,
                synced=spec.num_train_ranks > 0,
                base=None if spec.second_copy else self._policy.model.lm,
            )
            if spec.trains and spec.rollout.release_memory and not self.sampler.capabilities.release:
                raise CapabilityError(
                    f"rollout.release_memory is true, but engine {spec.rollout.engine} of rank {spec.rank} can't "
                    "release its memory. SGLang can only on a GPU: start your own server with --enable-memory-saver, "
                    "or set rollout.release_memory=false"
                )
        if spec.trains:
            keep_freed_memory(self.device)
        self._memory = SharedDevice(spec, self.device, self.engines, self.sampler)
        host, own = socket.gethostname(), f"rank_{spec.rank}"
        does = " and ".join(["trains"] * spec.trains + ["samples"] * spec.samples)
        _, *started = family(os.getpid())
        return [RankProcess(host, os.getpid(), own, does), *(RankProcess(host, p.pid, p.name, own) for p in started)]

    # ---- training (collective)

    @phase("annotate")
    def forward(self, message: RowsMessage, role: str) -> RowArrays:
        """Logprobs of this rank's rows under the engine of this role (collective)."""
        self._memory.for_training()
        batches = self._batches(message, message.samples())
        if role == REFERENCE.name and self.spec.model.lora.enabled:
            return self._policy.forward(batches, adapter=False)
        return self.engines[role].forward(batches)

    @phase("train")
    def forward_backward(
        self, message: RowsMessage, role: str, version: int, loss: LossFn, values: bool = False
    ) -> UpdateReport:
        """Add the gradient of this rank's micro-batches of the batch plan (collective). version: of the
        weights that samplers have. values: whether the values of each token are returned."""
        self._memory.for_training()
        rows = message.samples()
        engine = self.engines[role]
        batches = self._batches(message, rows)
        result = engine.forward_backward(batches, loss, entropies=values, num_scored=message.num_scored)
        mismatch = {}
        if role == POLICY.name:  # samplers have no weights of another role
            mismatch = {i: row_mismatch(rows[i], logprobs, version) for i, logprobs in result.logprobs.items()}
        of_tokens = {
            i: np.stack([result.logprobs[i], entropies])[:, rows[i].mask] for i, entropies in result.entropies.items()
        }
        if engine.flops is not None:
            scored = {i for micro in message.micro_batches[: message.num_scored] for i in micro}
            of_row = engine.flops.of_row
            flops = sum(of_row(len(row), int(row.mask.sum()), i not in scored) for i, row in rows.items())
            self._flops += flops / engine.coordinates.num_peers
            result.metrics.append(Metric(name="train/model_flops", sum=flops, reduce="sum", unit="FLOP"))
        logprobs = array_digest(row for _, row in sorted(result.logprobs.items()))
        return UpdateReport(metrics=result.metrics, mismatch=mismatch, logprobs=[logprobs], values=of_tokens)

    @phase("optim")
    def optim_step(self, role: str, lr: float, digests: bool) -> StepReport:
        report = self.engines[role].optim_step(lr, digests)
        return_freed_memory(self.device)
        return report

    @phase("export")
    def export(self, path: str, tokenizer_from: str | None, weights: bool) -> float | None:
        with self._memory.policy():
            return self._policy.export(path, tokenizer_from, weights)

    # ---- checkpoints

    @phase("checkpoint")
    def save(self, folder: str, continues: bool) -> None:
        """Start to write the state of each trained role (collective). continues: see `TrainEngine.save`."""
        for engine in self._trained():
            engine.save(folder, continues, self._reference())

    @phase("checkpoint")
    async def finish_save(self) -> dict[str, FileFact]:
        """Wait for the files that `save` began, while other commands run; returns their names, sizes and hashes."""
        return dict([await asyncio.to_thread(engine.finish_save) for engine in self._trained()])

    @phase("load")
    def load(self, folder: str) -> None:
        """Load the state of each trained role from a checkpoint (collective)."""
        for engine in self._trained():
            engine.load(folder, self._reference())

    @phase("checkpoint")
    def state_bytes(self) -> int:
        return sum(engine.state_bytes() for engine in self._trained())

    def _reference(self) -> Tensors:
        """The entry that identifies the reference model in a checkpoint; empty without one (collective)."""
        reference = self.engines.get(REFERENCE.name)
        return {} if reference is None else reference_digest(reference.model.lm)

    def _trained(self) -> list[TrainEngine]:
        return [engine for engine in self.engines.values() if engine.role.trains]

    def _batch_ended(self) -> None:
        self._num_batches += 1
        self._on_batches(self._num_batches)

    def _batches(self, message: RowsMessage, rows: Rows) -> list[Batch]:
        self._num_batches = 0
        with recorder.span("pack", "host"):
            micro_batches = zip(message.micro_batches, message.has_images, strict=True)
            return [self._policy.pack([rows[i] for i in micro], micro, images) for micro, images in micro_batches]

    # ---- weights

    @phase("load")
    def weights(self) -> RankBoxes:
        """The boxes that this rank holds of each tensor that samplers need (a collective, with LoRA)."""
        trainer, cfg = self._policy, self.spec.rollout
        weights = trainer.weights(merged=cfg is not None and not cfg.takes_adapters(self.spec.model.lora))
        return RankBoxes(
            tensors=weights.tensors,
            boxes=weights.boxes(),
            tied=weights.tied,
            digest=kind_for(self.device),
        )

    @phase("export")
    def model_bytes(self) -> int:
        return self._policy.model_bytes()

    @phase("report")
    def compute_notes(self) -> list[str]:
        """How trainer and embedded sampler compute attention; and on a CPU whether another dtype is much faster."""
        text = attention_text(self.spec.model.attn_implementation, self._policy.attention)
        if self.spec.rollout is not None and self.spec.rollout.engine == "embedded":
            text += ". The sampler computes prompts in this way, and new tokens by matrix products over its KV cache"
        notes = [text]
        if self.spec.model.lora.enabled and self.spec.rollout is not None:
            reason = self.spec.second_copy
            text = f"Samplers have their own copy of the weights that LoRA does not train: {reason}"
            notes[0] += ". " + (text if reason else SHARED)
        if self.device.type == "cpu" and self._policy.model_bytes() > NOT_TINY:
            own, wide = self._peak_flops, peak_flops(self.device, torch.float32)
            if own and wide and wide > MUCH_SLOWER * own:
                notes.append(
                    f"matrix products in {self.spec.model.dtype} take much longer than in float32 on this CPU: "
                    "model.dtype=float32 should make this run faster, and needs more memory"
                )
        return notes

    @phase("load")
    async def set_layout(self, layout: Layout) -> tuple[bool, bool]:
        """Set the layout of later syncs, and compare it with the parameters of this rank's sampler. Returns whether
        this rank's sampler releases its memory for training, and whether sampler and trainer use a device in turns."""
        if self._weight_sync is None or self._weight_sync.layout.hash != layout.hash:
            if self._weight_sync is not None:
                self._weight_sync.close()
            self._weight_sync = RankSync(self.spec, self.device, layout, self.engines.get(POLICY.name), self.sampler)
        if self.sampler is not None:
            await self.sampler.reconcile(layout)
        releases = self.spec.trains and self.spec.rollout is not None and bool(self.spec.rollout.release_memory)
        return releases, self._memory.is_shared

    @phase("sync")
    def make_room(self, part: str) -> None:
        """Free what this part of a sampler may need, on the devices of several ranks: weights or kv_cache."""
        self._memory.make_room(part)

    @phase("sync")
    async def restore_sampler(self, part: str) -> None:
        """Restore this part of a sampler that has released its memory: weights or kv_cache."""
        await self._memory.restore_sampler(part)

    @phase("sync")
    def sync_state(self, connection_id: str) -> SyncState:
        """This rank's state before the next sync."""
        return self._sync().state(connection_id)

    @phase("sync")
    async def sync(self, order: SyncOrder) -> tuple[Ack | None, SendReport | None]:
        """Do this rank's part of one sync: all ranks process the same transfers in the same order."""
        return await self._sync().sync(order)

    @phase("sync")
    async def cancel_sync(self) -> None:
        """Cancel the running sync, if there is one, and invalidate the sampler's weights. Before `set_layout` there is
        nothing to cancel."""
        if self._weight_sync is not None:
            await self._weight_sync.cancel()

    @phase("load")
    def trust_loaded_weights(self) -> None:
        """Sample with the weights that were loaded from the model's folder (evaluation without a trainer)."""
        self._sampler().trust_loaded_weights()

    # ---- sampler

    @phase("rollout")
    async def generate(self, request: Request) -> Turn:
        return await self._sampler().generate(request)

    @phase("rollout")
    async def abort(self, ids: list[str] | None = None) -> int:
        return await self._sampler().abort(ids)

    @phase("sync")
    async def release_memory(self) -> int:
        """Free the sampler's weights and caches for the colocated trainer, until the next sync; returns bytes."""
        return await self._sampler().release({"weights", "kv_cache"})

    @property
    def computed_tokens(self) -> int:
        """Of its sampler, since it started."""
        return 0 if self.sampler is None else self.sampler.stats().computed_tokens

    # ---- rest

    @phase("report")
    def kv_cache_bytes(self) -> int | None:
        """The limit of its sampler's KV cache, if the device's free memory decides it."""
        return self._sampler().stats().kv_cache_bytes

    @phase("report")
    def memory(self) -> list[Metric]:
        """This process's memory metrics, and those of the recorder."""
        settle(self.device)
        phases, of_device = recorder.take_memory(), memory_stats(self.device)
        if of_device:
            of_device["peak_bytes"] = max([of_device["peak_bytes"], *phases.values()])
        sizes = {f"memory/device_{name}": size for name, size in of_device.items()}
        sizes |= {f"memory/phase_bytes/{name}": size for name, size in phases.items()}
        planned = self.spec.memory
        if planned is not None and (self.device.type != "cpu" or not planned.host):  # Ray's is for accelerators
            own = {name: MEASURED[name] for name in phases if MEASURED.get(name) in planned.phases}
            unseen = () if self.device.type == "cpu" else (LIBRARIES,)  # by the allocator
            sizes |= {f"memory/planned_bytes/{name}": planned.total(own[name], unseen) for name in own}
        metrics = memory_metrics(own_name=f"rank_{self.spec.rank}")
        metrics += [Metric(name=name, sum=size, reduce="max", unit="bytes") for name, size in sizes.items()]
        flops, self._flops = self._flops, 0.0
        if flops and self._peak_flops is not None:
            available = self._peak_flops * recorder.train_s
            metrics.append(Metric(name="perf/mfu", sum=flops, weight=available, unit="fraction"))
        return metrics + recorder.step_metrics(blocking=self.device.type == "cpu")

    # ---- traces

    @phase("report")
    def clock(self) -> int:
        """This machine's unix time in nanoseconds."""
        return time.time_ns()

    @phase("report")
    def start_profiler(self) -> None:
        """Start torch.profiler, and keep all spans from now on. Without it if the user's own profiler is active."""
        recorder.clear(TRACED)
        if not torch.autograd._profiler_enabled():
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch.profiler prints lines that begin with USDT
            self._profiler, recorder.annotate = torch.profiler.profile(), torch.profiler.record_function
            self._profiler.start()

    @phase("report")
    def write_trace(self, folder: Path) -> tuple[str, str, str]:
        """Stop the profiler, if it runs, and write this rank's files. Returns the names of its host and its device, and
        the error of a failed write, or ""."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        recorder.annotate, error = nullcontext, ""
        if self.engines:
            settle(self.device)
        try:
            write_rank(folder, recorder.trace(self.spec.rank))
            if profiler is not None:
                profiler.export_chrome_trace(str(folder / PROFILE_FILE.format(self.spec.rank)))
        except (OSError, RuntimeError) as cause:  # torch raises a RuntimeError for a full disk
            error = getattr(cause, "strerror", None) or str(cause)
        return socket.gethostname(), device_name(self.device), error

    @phase("end")
    async def stop(self) -> None:
        """Close the sampler, the weight sync and the process group."""
        recorder.measure = dict
        if self.sampler is not None:
            await self.sampler.close()
        if self._weight_sync is not None:
            self._weight_sync.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    @cached_property
    def _peak_flops(self) -> float | None:
        return peak_flops(self.device, DTYPES[self.spec.model.dtype])

    def _memory_now(self) -> dict[str, int]:
        has_tensors = bool(self.engines) or self.sampler is not None  # else it must not open its device
        parts = (memory_stats(self.device) if has_tensors else {}) or own_memory()
        if has_tensors:
            reset_peak_memory(self.device)  # so that the next phase has a peak of its own
        for engine in self.engines.values() if self._profiler is not None else ():
            parts |= {name: parts.get(name, 0) + size for name, size in engine.memory().items()}
        return parts

    @property
    def _policy(self) -> TrainEngine:
        """The engine whose weights samplers get."""
        return self.engines[POLICY.name]

    def _sync(self) -> RankSync:
        if self._weight_sync is None:
            raise ValueError(f"rank {self.spec.rank}: sync was called before set_layout")
        return self._weight_sync

    def _sampler(self) -> RolloutEngine:
        if self.sampler is None:
            raise ValueError(f"rank {self.spec.rank} has no sampler")
        return self.sampler


def _open_store(spec: WorkerSpec) -> dist.Store:
    """The store in which the train ranks form their process group."""
    if isinstance(spec.rendezvous, str):
        return dist.FileStore(spec.rendezvous, spec.num_train_ranks)
    host, port = spec.rendezvous
    timeout = datetime.timedelta(seconds=spec.timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
