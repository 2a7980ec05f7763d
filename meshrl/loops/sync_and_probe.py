"""The weight sync of a step with its metrics, and the probe that proves it where samples are stale."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from meshrl.algo.mismatch import row_mismatch
from meshrl.cluster.weight_sync import sync_weights
from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Metric, Sample
from meshrl.loops.job import Job
from meshrl.model.lora import LEAST_MERGED
from meshrl.sync.layout import Ack


async def first_sync(job: Job) -> list[Metric]:
    """The sync before the loop's first step. Its metrics are named first_sync/* and belong to step 1. A resumed run
    drops them: it has reported them before, and its metrics must equal those of an uninterrupted run."""
    started_at = time.perf_counter()
    metrics = await _sync(job)
    job.step_started_at = time.perf_counter()
    job.rollouts.routes.take_busy_s()
    metrics.append(Metric(name="sync/latency_s", sum=job.step_started_at - started_at, reduce="sum", unit="s"))
    first = metrics if job.step == 0 else []
    return [replace(m, name=f"first_sync/{m.name.partition('/')[2]}") for m in first]


async def sync(job: Job) -> list[Metric]:
    """Send the samplers the trainer's weights, with proofs, unless they have them; returns the metrics."""
    if job.trainer.is_synced and not job.rollouts.releases_memory:
        return []
    with job.run.spans("sync"):
        metrics = await probe_result(job) + await _sync(job)
    if job.probed is not None:
        job.probe = asyncio.create_task(_probe(job, job.probed))
        # Marks the exception as retrieved, for a run that ends before it waits for the probe.
        job.probe.add_done_callback(lambda task: task.cancelled() or task.exception())
    return metrics


async def _sync(job: Job) -> list[Metric]:
    started_at = time.perf_counter()
    acks = await sync_weights(job.trainer, job.rollouts, job.layout)
    took_s = time.perf_counter() - started_at
    sent, extra = max(ack.num_bytes for ack in acks), max(ack.extra_bytes for ack in acks)
    metrics = [
        Metric(name="sync/num_bytes", sum=float(sent), reduce="max", unit="bytes"),
        Metric(name="sync/gb_per_s", sum=sent / 1e9, weight=took_s, unit="GB/s"),
        Metric(name="sync/extra_bytes", sum=float(extra), reduce="max", unit="bytes"),
        Metric(name="sync/version", sum=float(job.trainer.version), reduce="max", unit="version"),
        *_changes(job, acks[0]),
        *_merged_share(job, acks[0].lora_change),
    ]
    for ack in acks:
        metrics += [
            Metric(name="sync/proven_wire", sum=float(ack.wire), unit="fraction"),
            Metric(name="sync/proven_read_back", sum=float(ack.read_back is True), unit="fraction"),
        ]
        metrics += [
            Metric(name=f"sync/{stage}_s", sum=seconds, reduce="max", unit="s")
            for stage, seconds in ack.seconds.items()
        ]
    return metrics


def _changes(job: Job, ack: Ack) -> list[Metric]:
    """The fraction of the weights that changed: elements if the senders count them, else tensors by their digests."""
    tensors = job.layout.tensors
    metrics = []
    if ack.num_changed is not None:
        share = ack.num_changed / max(1, len(tensors))
        metrics.append(Metric(name="sync/changed_tensors", sum=share, unit="fraction"))
    if ack.num_changed_elements is not None:
        num_elements = sum(math.prod(tensor.shape) for tensor in tensors)
        share = ack.num_changed_elements / max(1, num_elements)
        metrics.append(Metric(name="sync/changed_elements", sum=share, unit="fraction"))
    return metrics


def _merged_share(job: Job, change: tuple[float, float]) -> list[Metric]:
    """The share of the adapters' change that the merged weights of the samplers have, with a note if it is low."""
    projection, square = change
    if not square:
        return []
    if projection / square < LEAST_MERGED and "merged" not in job.noted:
        job.noted.add("merged")
        job.run.note(
            f"step {job.step + 1}: samplers get LoRA adapters merged into {job.cfg.model.dtype} weights, which have "
            f"{projection / square:.0%} of the adapters' change: the rest is below half a step of that dtype "
            "(sync/lora_merged_share). model.dtype=float32 keeps it, and so does rollout.engine=embedded, which gets "
            "adapters themselves, unless they are on experts"
        )
    return [Metric(name="sync/lora_merged_share", sum=projection, weight=square, unit="fraction")]


_PROBED_TOKENS = 2048


async def _probe(job: Job, rows: Sequence[Sample]) -> list[Metric]:
    """Score these rows of the last step with the new weights, in the trainer and in every sampler, and compare.
    Samples that are older than the trainer's weights prove nothing when they are re-scored.

    The trainer scores at once; the answers of busy samplers may come later. Raises: SamplerMismatchError, also when no
    token of an answer was compared.
    """
    version, trainer = job.trainer.version, job.trainer
    ours, theirs = await asyncio.gather(
        trainer.forward(trainer.plan_rows(rows), "policy"),
        asyncio.gather(*(job.rollouts.score(row.tokens) for row in rows)),
    )
    mismatch, answers = dict[int, np.ndarray](), list[Sample]()
    for row, logprobs, of_samplers in zip(rows, ours, theirs, strict=True):
        for rank, sampled in of_samplers.items():
            versions = np.full(len(row), version, np.int32)
            answer = replace(row, rollout_logprobs=sampled, versions=versions, engine_id=f"rank {rank}")
            mismatch[len(answers)] = row_mismatch(answer, logprobs, version)
            answers.append(answer)
    if rows and not answers:  # all samplers were lost meanwhile
        return []
    num_compared = sum(row[1] > 0 for row in mismatch.values())
    if not answers or num_compared < len(answers):
        raise SamplerMismatchError(
            f"at weight version {version} the probe of the sync compared tokens in {num_compared} of {len(answers)} "
            f"answers of samplers to {len(rows)} rows; it must compare a token in every answer, or these weights are "
            "not proven. The cause is an error in meshrl or in the engine, not in the config. Continue from the last "
            "checkpoint with run.resume=auto, and report the error"
        )
    job.proof.check(mismatch, answers, job.cfg.model.dtype, version, job.run.note)
    largest = max(float(row[2] / row[1]) for row in mismatch.values())
    return [Metric(name="proof/probe_diff_mean", sum=largest, reduce="max", unit="nats")]


async def probe_result(job: Job) -> list[Metric]:
    """Wait for the probe of the last sync, if there is one; returns its metrics. Raises: SamplerMismatchError."""
    probe, job.probe = job.probe, None
    return [] if probe is None else await probe


def rows_to_probe(job: Job, samples: Sequence[Sample]) -> list[Sample] | None:
    """The shortest rows with trained tokens: as many as fit into _PROBED_TOKENS, at least one, at most 4. A row that
    fills the context is cut, because servers score only with room for one more token. Samplers score at temperature 1,
    so the trainer does too. None if no row has a trained token in that room."""
    room = job.task.max_context_tokens - 1
    rows = sorted((s for s in samples if s.mask[:room].any()), key=len)[:4]
    if not rows:
        return None
    ends = np.cumsum([len(s) for s in rows])
    picked = [s for s, end in zip(rows, ends) if end <= _PROBED_TOKENS or s is rows[0]]
    return [replace(s if len(s) <= room else _first_tokens(s, room), temperature=1.0) for s in picked]


def _first_tokens(sample: Sample, count: int) -> Sample:
    cut = replace(sample, token_extras={name: array[:count] for name, array in sample.token_extras.items()})
    for f in fields(cut):
        value = getattr(cut, f.name)
        if isinstance(value, np.ndarray):
            setattr(cut, f.name, value[:count])
    return cut
