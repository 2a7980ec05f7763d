"""The weight sync of a step with its metrics, and what proves that samplers have the trainer's weights: before the
optimizer step, the trainer's logprobs of the sampled tokens are compared with the sampler's; where samples are stale,
those of a probe's tokens after each sync."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from meshrl.agent.flatten import flatten
from meshrl.algo.mismatch import SHORT_ROW_TOKENS, mismatch_metrics, row_means, row_mismatch
from meshrl.cluster.weight_sync import sync_weights
from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Metric, Prompt, Request, Sample, SamplingParams, Trajectory, turn_seed
from meshrl.model.lora import LEAST_MERGED
from meshrl.sync.layout import Ack

if TYPE_CHECKING:
    from meshrl.loops.job import Job

MARGIN = 10.0  # a later step may differ this many times more than the first, when the weights were proven equal
ROW_MARGIN = 5.0  # the limit of the worst row, as a multiple of the limit of an engine's mean
FLOOR_NATS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}  # no limit is below this
CEILING_NATS = {"float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}  # a larger difference is never rounding
SCORED_ONE_IN = 8  # of each sampler's rows without a gradient, one in so many is scored
PERSISTENT = 3  # so many weight versions in succession with a difference above the limit end the run


@dataclass(slots=True)
class SamplerProof:
    """The threshold for the mean absolute difference of logprobs, in nats per token, of each engine. The limit for a
    single row is ROW_MARGIN times as high.

    It is calibrated on the first step: both sides then have the weights of the model's folder, proven by digest, so the
    difference is only rounding. Rounding grows when training makes the distributions sharper. So only a difference
    above the ceiling ends the run at once; above the threshold, at the PERSISTENT-th weight version in succession.

    last_above: the last version with a difference above the threshold. num_above: how many up to it, in succession.
    """

    threshold: float | None = None
    last_above: int = -1
    num_above: int = 0

    def rows_to_score(self, samples: Sequence[Sample], rows: Collection[int], version: int, seed: int) -> set[int]:
        """Those of `rows`, of samples without a gradient, whose logprobs are compared: of each sampler one in
        SCORED_ONE_IN, and so many that the mean is one of SHORT_ROW_TOKENS if its rows have them; all until the
        threshold is calibrated. Drawn by seed and version, from rows with a token of this version if there are any."""
        if self.threshold is None:
            return {*rows}
        num_checked = {i: int((samples[i].mask & (samples[i].versions == version)).sum()) for i in rows}
        of_engines: dict[str, list[int]] = {}
        for i in sorted(rows, key=lambda i: (not num_checked[i], turn_seed(seed, version, i, 0))):
            of_engines.setdefault(samples[i].engine_id, []).append(i)
        drawn = set[int]()
        for own in of_engines.values():
            tokens = np.cumsum([num_checked[i] for i in own])
            enough = 1 + int(tokens.searchsorted(min(SHORT_ROW_TOKENS, tokens[-1])))
            drawn.update(own[: max(enough, -(-len(own) // SCORED_ONE_IN))])
        return drawn

    def check(
        self,
        mismatch: Mapping[int, np.ndarray],
        samples: Sequence[Sample],
        dtype: str,
        version: int,
        note: Callable[[str], None],
    ) -> list[Metric]:
        """Compare the trainer's logprobs with the sampler's; returns the metrics. mismatch: index of a sample -> its
        row_mismatch (algo/mismatch.py). note: gets the warning."""
        if not mismatch:
            return []
        rows, engines = np.stack(list(mismatch.values())), [samples[i].engine_id for i in mismatch]
        metrics, checked = mismatch_metrics(rows), rows[:, 1].sum()
        if not checked:  # nothing was sampled with the trainer's weights
            return metrics
        limit = ceiling = CEILING_NATS[dtype]
        if self.threshold is None:
            mean = float(rows[:, 2].sum() / checked)
            self.threshold = min(ceiling, max(FLOOR_NATS[dtype], MARGIN * mean))
        else:
            limit = self.threshold
        names = np.array(engines)
        means = {name: _mean(rows[names == name]) for name in dict.fromkeys(engines)}
        engine = max(means, key=lambda name: means[name])
        of_rows = row_means(rows)
        worst = int(of_rows.argmax())
        row = float(of_rows[worst])
        excess = max(means[engine], row / ROW_MARGIN)
        if excess <= limit:
            return metrics
        text = (
            f"at weight version {version} the logprobs of sampler {engine} differ from the trainer's by "
            f"{means[engine]:.3g} nats per token (worst row {row:.3g}: {samples[[*mismatch][worst]].trajectory_id} "
            f"of {engines[worst]}; largest difference {rows[:, 3].max():.3g}); allowed: {limit:.3g} for the mean "
            f"of a sampler, {ROW_MARGIN * limit:.3g} for a row. Possible causes: stale or corrupt weights in the "
            "sampler, another temperature or sampling filter, or different forward passes of the model in sampler "
            "and trainer. "
        )
        is_new = version != self.last_above  # else another part of the step, or the probe, was above it, too
        if is_new:
            self.num_above = self.num_above + 1 if version == self.last_above + 1 else 1
            self.last_above = version
        if excess > ceiling or self.num_above >= PERSISTENT:
            raise SamplerMismatchError(f"{text}No optimizer step was taken on these samples")
        if is_new:
            note(f"{text}The run ends if this lasts for {PERSISTENT} versions, or above {ceiling:.3g}")
        return metrics


def _mean(rows: np.ndarray) -> float:
    return float(rows[:, 2].sum() / max(1, rows[:, 1].sum()))


async def first_sync(job: Job) -> list[Metric]:
    """The sync before the loop's first step. Its metrics are named first_sync/* and belong to step 1. A resumed run
    drops them: it has reported them before, and its metrics must equal those of an uninterrupted run."""
    started_at = time.perf_counter()
    metrics = await _sync(job)
    _start_probe(job)  # of ranks that return to a checkpoint
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
    _start_probe(job)
    return metrics


def _start_probe(job: Job) -> None:
    if job.probed is not None:
        job.probe = asyncio.create_task(_probe(job, job.probed))
        # Marks the exception as retrieved, for a run that ends before it waits for the probe.
        job.probe.add_done_callback(lambda task: task.cancelled() or task.exception())


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
    """The fraction of the weights that changed: elements if the senders count them, else tensors by their digests; and
    the fraction of the tensors for which nothing is sent, because they are the trainer's own."""
    tensors = job.layout.tensors
    metrics = []
    if ack.num_changed is not None:
        share = ack.num_changed / max(1, len(tensors))
        metrics.append(Metric(name="sync/changed_tensors", sum=share, unit="fraction"))
    if ack.num_shared:
        share = ack.num_shared / max(1, len(tensors))
        metrics.append(Metric(name="sync/shared_tensors", sum=share, unit="fraction"))
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


NUM_PROBES = 4  # requests of a probe to each sampler: two to each of two contexts, so that they share a prefill
PROBED_TOKENS = 8  # sampled by each request, so that most of them are decoded with its cache
_CONTEXT_TOKENS = 512  # at most, of each request


async def _probe(job: Job, contexts: Sequence[np.ndarray]) -> list[Metric]:
    """Every sampler answers requests like those of an agent, with the new weights; the trainer, which still has these
    weights, scores the sampled tokens, and the proof compares them. So each cache and each copy of a weight that an
    answer uses is compared. The samples of the last step are older, and prove nothing when they are re-scored.

    Waits for the samplers, which need nothing from the trainer.
    """
    version, trainer = job.trainer.version, job.trainer
    sampling = SamplingParams(temperature=job.cfg.rollout.sampling.temperature, ignore_eos=True)
    prompts = [
        Prompt(id=f"probe {i % len(contexts)}", ordinal=version, ids=contexts[i % len(contexts)])
        for i in range(NUM_PROBES)
    ]
    requests = [
        Request(
            id=f"probe-{version}-{i}",
            context_ids=cast(np.ndarray, prompt.ids),
            sampling=sampling,
            seed=turn_seed(job.cfg.run.seed, version, i, 0),
            max_new_tokens=PROBED_TOKENS,
            min_version=version,
            is_urgent=True,
        )
        for i, prompt in enumerate(prompts)
    ]
    turns = await job.rollouts.probe(requests)
    samples, _ = flatten(
        [
            Trajectory(prompt=prompt, group_id=prompt.id, index=i, turns=[turn], reward=0.0)
            for i, (prompt, turn) in enumerate(zip(itertools.cycle(prompts), turns))
        ]
    )
    logprobs = await trainer.forward(trainer.plan_rows(samples), "policy")
    mismatch = {i: row_mismatch(samples[i], row, version) for i, row in logprobs.items()}
    num_compared = sum(row[1] > 0 for row in mismatch.values())
    if not turns or num_compared < len(turns):
        raise SamplerMismatchError(
            f"at weight version {version} the probe of the sync compared tokens in {num_compared} of {len(turns)} "
            "answers of samplers; it must compare a token in every answer, or these weights are not proven. The cause "
            "is an error in meshrl or in the engine, not in the config. Continue from the last checkpoint with "
            "run.resume=auto, and report the error"
        )
    job.proof.check(mismatch, samples, job.cfg.model.dtype, version, job.run.note)
    largest = max(float(row[2] / row[1]) for row in mismatch.values())
    return [Metric(name="proof/probe_diff_mean", sum=largest, reduce="max", unit="nats")]


async def probe_result(job: Job) -> list[Metric]:
    """Wait for the probe of the last sync, if there is one; returns its metrics."""
    probe, job.probe = job.probe, None
    return [] if probe is None else await probe


def contexts_to_probe(samples: Sequence[Sample]) -> list[np.ndarray] | None:
    """What precedes the sampled tokens in the two shortest rows of different groups: contexts of real requests, of long
    ones the first and last parts, together _CONTEXT_TOKENS. None if no row has a sampled token."""
    contexts: dict[str, np.ndarray] = {}
    for sample in samples:
        context = sample.tokens[: sample.mask.argmax()]
        if sample.mask.any() and len(context) < len(contexts.get(sample.group_id, sample.tokens)):
            contexts[sample.group_id] = context
    shortest, part = sorted(contexts.values(), key=len)[: NUM_PROBES // 2], _CONTEXT_TOKENS // 2
    return [x if len(x) <= 2 * part else np.concatenate([x[:part], x[-part:]]) for x in shortest] or None
