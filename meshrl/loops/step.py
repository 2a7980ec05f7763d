"""The parts of a step that the schedules share, as plain functions: answer, score, train_step, sync, finish_step."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from meshrl.agent.attempt import attempt, check_attempts
from meshrl.agent.flatten import flatten
from meshrl.agent.loop import AgentContext
from meshrl.algo.advantages import assign_advantages
from meshrl.algo.correction import correction_summary
from meshrl.algo.losses import make_policy_loss, rows_without_gradient
from meshrl.algo.mismatch import row_mismatch
from meshrl.algo.reduce import assign_loss_weights
from meshrl.cluster.groups import RolloutGroup
from meshrl.cluster.row_cache import PlannedRows
from meshrl.cluster.weight_sync import sync_weights
from meshrl.config.run import RunConfig
from meshrl.core.errors import MeshrlError, SamplerMismatchError
from meshrl.core.types import Metric, Prompt, Purpose, Sample, SamplingParams, Trajectory
from meshrl.loops.deadlines import gather_with_deadline
from meshrl.loops.job import Job, Task
from meshrl.loops.optimizer import optimizer_step
from meshrl.loops.speed import request_times, throughput, unknown_device
from meshrl.loops.step_notes import note_what_is_wrong
from meshrl.monitor.memory import memory_metrics
from meshrl.monitor.metrics import histogram
from meshrl.monitor.token_log import TrainerValues
from meshrl.reward.score import Scorer
from meshrl.sync.layout import Ack
from meshrl.train.optim import learning_rate

Ended = Callable[[Prompt, Trajectory], Awaitable[None]]


async def collect(
    cfg: RunConfig,
    task: Task,
    rollouts: RolloutGroup,
    prompts: Sequence[Prompt],
    purpose: Purpose,
    min_version: int,
    ended: Ended | None = None,
) -> list[Trajectory]:
    """All attempts at these prompts, concurrently; returned in the order of prompts and attempts.

    min_version: the oldest weights that may answer. ended: awaited with each attempt as soon as it has ended.
    """
    is_eval = purpose == "eval"
    given = cfg.eval_sampling if is_eval else cfg.rollout.sampling
    num_attempts = cfg.loop.eval_samples if is_eval else cfg.loop.samples_per_prompt
    sampling = SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        stop_token_ids=tuple(sorted({*task.stop_token_ids, *given.stop_token_ids})),
        stop=tuple(given.stop),
    )
    runs = []
    for prompt in prompts:
        context = AgentContext(
            tokenizer=task.tokenizer,
            sampling=sampling,
            max_new_tokens=given.max_new_tokens,
            max_context_tokens=task.max_context_tokens,
            run_seed=cfg.run.seed,
            group_id=group_id(prompt, purpose),
            purpose=purpose,
            min_version=min_version,
        )
        for index in range(num_attempts):
            one = attempt(task.agent, prompt, index, rollouts.generate, context, cfg.agent.kind)
            runs.append(one if ended is None else _then(one, partial(ended, prompt)))
    try:
        return await gather_with_deadline(cfg.cluster, "eval" if is_eval else "rollout", runs)
    finally:
        for prompt in prompts:
            rollouts.end_session(group_id(prompt, purpose))


async def _then(one: Awaitable[Trajectory], ended: Callable[[Trajectory], Awaitable[None]]) -> Trajectory:
    trajectory = await one
    await ended(trajectory)
    return trajectory


def group_id(prompt: Prompt, purpose: Purpose) -> str:
    """The id of the group of attempts at a prompt. A held-out prompt may have the id of a training prompt."""
    return f"{'eval:' if purpose == 'eval' else ''}{prompt.id}@{prompt.ordinal}"


async def answer(job: Job, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Answer these training prompts with the current weights or newer ones."""
    total, done = len(prompts) * job.cfg.loop.samples_per_prompt, itertools.count(1)

    async def ended(prompt: Prompt, trajectory: Trajectory) -> None:
        job.run.progress(f"{next(done)} of {total} answers")

    with job.run.spans("rollout"):
        return await collect(job.cfg, job.task, job.rollouts, prompts, "train", job.trainer.version, ended)


async def score(job: Job, trajectories: Sequence[Trajectory]) -> list[Metric]:
    """Score answers; returns the metrics."""
    with job.run.spans("reward"):
        return await grade(job.cfg, job.scorer, trajectories)


_MAX_REFUSED_STEPS = 3  # in succession


async def train_step(job: Job, trajectories: Sequence[Trajectory], replaced: Sequence[Trajectory] = ()) -> list[Metric]:
    """Train on scored trajectories: all optimizer steps of one step, without the sync. Returns the metrics. Without a
    reward there is nothing to train on, and the weights stay. replaced: answers of the step that are not trained.

    Raises: AgentError or RewardError when too many attempts or gradings failed; MeshrlError when the engine refused or
    aborted every request of the last _MAX_REFUSED_STEPS steps.
    """
    answers = [*trajectories, *replaced]
    check_failures(job.cfg, job.scorer, answers)
    refusals = [t.failure.message for t in answers if t.failure is not None and t.failure.kind == "engine"]
    job.num_refused_steps = job.num_refused_steps + 1 if 0 < len(refusals) == len(answers) else 0
    if job.num_refused_steps == _MAX_REFUSED_STEPS:
        raise MeshrlError(
            f"step {job.step + 1}: in {_MAX_REFUSED_STEPS} steps in succession the engine refused or aborted every "
            f"request. First error: {refusals[0]}"
        )
    samples, metrics = flatten(trajectories)
    job.token_values = None  # of a step that failed
    if not samples:
        why = f". The engine refused {len(refusals)} of them, such as: {refusals[0]}" if refusals else ""
        what = f"none of {len(trajectories)} trajectories has a reward; nothing to train on{why}"
        job.run.note(f"step {job.step + 1}: {what}")
    else:
        if job.rollout_log.has_file(job.step + 1):
            job.token_values = TrainerValues(version=job.trainer.version, samples=samples)
        with job.run.spans("train"):
            if job.cfg.loop.staleness:
                metrics.append(_staleness(samples, job.trainer.version))
            metrics += await release_samplers(job)
            updates = split_updates(job, samples, job.cfg.train.updates_per_step)
            metrics += await annotate(job, updates)
            metrics += assign_advantages(samples, job.cfg.algo)
            metrics += await update(job, updates)
            job.probed = _rows_to_probe(job, samples) if job.cfg.loop.staleness else None
    if rewards := [t.reward for t in replaced if t.reward is not None]:  # the mean is that of all answers
        metrics.append(Metric(name="reward/mean", sum=math.fsum(rewards), weight=len(rewards)))
    return metrics + rollout_metrics(job, answers, samples)


def _staleness(samples: Sequence[Sample], version: int) -> Metric:
    """By how many versions the oldest token of each sample is older than the trainer's weights."""
    oldest = [int(s.versions[s.mask].min()) for s in samples if s.mask.any()]
    return histogram("rollout/staleness_versions", version - np.array(oldest), "versions")


async def grade(cfg: RunConfig, scorer: Scorer, trajectories: Sequence[Trajectory]) -> list[Metric]:
    """Score the trajectories, within the deadline of the phase; returns the metrics. The caller checks the number of
    failures (`check_failures`) when all trajectories of a step are scored."""
    (metrics,) = await gather_with_deadline(cfg.cluster, "reward", [scorer.score(trajectories)])
    return metrics


def check_failures(cfg: RunConfig, scorer: Scorer, trajectories: Sequence[Trajectory]) -> None:
    """Raises: AgentError or RewardError when too many attempts or gradings failed. trajectories: all of a step."""
    check_attempts(trajectories, cfg.agent.kind, cfg.agent.max_failure_fraction)
    scorer.check_failures(trajectories)


def split_updates(job: Job, samples: Sequence[Sample], num_updates: int) -> list[PlannedRows]:
    """Divide the samples into num_updates optimizer steps with equally many groups; groups are not split."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    parts: list[list[Sample]] = [[] for _ in range(num_updates)]
    for i, members in enumerate(groups.values()):
        parts[i * num_updates // len(groups)].extend(members)
    return [job.trainer.plan_rows(part) for part in parts if part]


async def release_samplers(job: Job) -> list[Metric]:
    """Release the memory of colocated samplers for the trainer, until the next sync."""
    if not job.cfg.rollout.release_memory:
        return []
    return [
        Metric(name="memory/released_bytes", sum=float(await job.rollouts.release_memory()), reduce="sum", unit="bytes")
    ]


async def annotate(job: Job, updates: Sequence[PlannedRows]) -> list[Metric]:
    """Compute only the logprobs that the algorithm needs: of the reference when the KL coefficient is above 0, old ones
    when the step has several updates (a single update is on-policy and needs no second forward pass)."""
    metrics: list[Metric] = []
    for update in updates:
        if job.cfg.algo.kl.coef > 0:
            for s, row in zip(update.samples, await job.trainer.forward(update, "reference"), strict=True):
                s.ref_logprobs = row
        if len(updates) > 1:
            version, mismatch = job.trainer.version, dict[int, np.ndarray]()
            for i, row in enumerate(await job.trainer.forward(update, "policy")):
                update.samples[i].old_logprobs = row
                mismatch[i] = row_mismatch(update.samples[i], row, version)
            metrics += job.proof.check(mismatch, update.samples, job.cfg.model.dtype, version)
    return metrics


async def update(job: Job, updates: Sequence[PlannedRows]) -> list[Metric]:
    """One optimizer step for each of the updates that has a token to train, else a note. The sampler proof is checked
    between the gradient and the step."""
    cfg, metrics = job.cfg, list[Metric]()
    loss = make_policy_loss(cfg.algo)
    total = cfg.loop.num_steps * cfg.train.updates_per_step
    for part in updates:
        if not assign_loss_weights(part.samples, cfg.algo, cfg.rollout.sampling.max_new_tokens):
            job.run.note(f"step {job.step + 1}: {_nothing_to_train(part.samples)}; this optimizer step is skipped")
            continue
        scored = rows_without_gradient(cfg.algo, part.samples)
        rows = job.trainer.plan_rows(part.samples, scored) if scored else part
        report = await job.trainer.forward_backward(rows, loss, job.token_values is not None)
        job.trainer.drop_rows(part)
        share = Metric(name="train/no_gradient_fraction", sum=len(scored), weight=len(part.samples), unit="fraction")
        metrics.append(share)
        if job.token_values is not None:
            job.token_values.add(part.samples, report.values)
        metrics += report.metrics
        if len(updates) == 1:
            metrics += job.proof.check(report.mismatch, part.samples, cfg.model.dtype, job.trainer.version)
        metrics += await probe_result(job)
        lr = learning_rate(job.num_updates, total, cfg.peak_lr, cfg.train.scheduler)
        step, of_the_step = await optimizer_step(job.trainer, job.step, lr)
        job.num_updates += 1
        if step.skipped:
            job.run.note(
                f"step {job.step + 1}: the gradient norm is {step.grad_norm}, so this optimizer step is skipped; "
                f"look at loss/* (the loss is {cfg.algo.loss.kind})"
            )
        metrics += of_the_step
    return metrics + correction_summary(metrics)


def _nothing_to_train(samples: Sequence[Sample]) -> str:
    cut = sum(sample.truncated for sample in samples)
    if not cut:
        return f"none of {len(samples)} rows has a sampled token"
    return (
        f"{cut} of {len(samples)} rows were cut off and algo.truncated is mask, so no token is trained. Raise "
        "rollout.sampling.max_new_tokens (or agent.args.max_turns), or set algo.truncated to train"
    )


async def first_sync(job: Job) -> list[Metric]:
    """The sync before the loop's first step. Its metrics are named first_sync/* and belong to step 1. A resumed run
    drops them: it has reported them before, and its metrics must equal those of an uninterrupted run."""
    began = time.perf_counter()
    metrics = await _sync(job)
    job.began = time.perf_counter()
    job.rollouts.take_busy_s()
    metrics.append(Metric(name="sync/latency_s", sum=job.began - began, reduce="sum", unit="s"))
    first = metrics if job.step == 0 else []
    return [replace(m, name=f"first_sync/{m.name.partition('/')[2]}") for m in first]


async def sync(job: Job) -> list[Metric]:
    """Send the samplers the trainer's weights, with proofs, unless they have them; returns the metrics."""
    if job.trainer.is_synced and not job.cfg.rollout.release_memory:
        return []
    with job.run.spans("sync"):
        metrics = await probe_result(job) + await _sync(job)
    if job.probed is not None:
        job.probe = asyncio.create_task(_probe(job, job.probed))
        # Marks the exception as retrieved, for a run that ends before it waits for the probe.
        job.probe.add_done_callback(lambda task: task.cancelled() or task.exception())
    return metrics


async def _sync(job: Job) -> list[Metric]:
    began = time.perf_counter()
    acks = await sync_weights(job.trainer, job.rollouts, job.layout)
    took_s = time.perf_counter() - began
    sent, extra = max(ack.num_bytes for ack in acks), max(ack.extra_bytes for ack in acks)
    metrics = [
        Metric(name="sync/num_bytes", sum=float(sent), reduce="max", unit="bytes"),
        Metric(name="sync/gb_per_s", sum=sent / 1e9, weight=took_s, unit="GB/s"),
        Metric(name="sync/extra_bytes", sum=float(extra), reduce="max", unit="bytes"),
        Metric(name="sync/version", sum=float(job.trainer.version), reduce="max", unit="version"),
        *_changes(job, acks[0]),
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
    job.proof.check(mismatch, answers, job.cfg.model.dtype, version)
    largest = max(float(row[2] / row[1]) for row in mismatch.values())
    return [Metric(name="proof/probe_diff_mean", sum=largest, reduce="max", unit="nats")]


async def probe_result(job: Job) -> list[Metric]:
    """Wait for the probe of the last sync, if there is one; returns its metrics. Raises: SamplerMismatchError."""
    probe, job.probe = job.probe, None
    return [] if probe is None else await probe


def _rows_to_probe(job: Job, samples: Sequence[Sample]) -> list[Sample] | None:
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


def rollout_metrics(job: Job, trajectories: Sequence[Trajectory], samples: Sequence[Sample]) -> list[Metric]:
    """Lengths and speeds of a step, in addition to the metrics of flatten and the scorer."""
    lengths = [sum(len(turn.output_ids) for turn in t.turns) for t in trajectories]
    sampled, trained = sum(lengths), sum(len(s) for s in samples)
    rollout_s, train_s = job.run.spans.seconds("rollout"), job.run.spans.seconds("train")
    metrics = [
        histogram("rollout/length_tokens", np.array(lengths), "tokens"),
        Metric(name="rollout/num_tokens", sum=float(sampled), reduce="sum", unit="tokens"),
        Metric(name="train/num_tokens", sum=float(trained), reduce="sum", unit="tokens"),
        *job.rollouts.replacement_metrics(),
        *request_times(trajectories),
    ]
    if rollout_s:  # 0 if all groups of an overlapped step were sampled before the previous one ended
        metrics.append(Metric(name="rollout/tokens_per_s", sum=sampled, weight=rollout_s, unit="tokens/s"))
    if train_s:
        metrics.append(Metric(name="train/tokens_per_s", sum=trained, weight=train_s, unit="tokens/s"))
    return metrics


def _use_of_devices(job: Job, num_trained_tokens: int) -> list[Metric]:
    """The trained tokens per second and device, and the fraction of a step in which each side had nothing to do, if
    samplers have ranks of their own."""
    now, spans = time.perf_counter(), job.run.spans
    wall, job.began = now - job.began, now
    busy = job.rollouts.take_busy_s() / len(job.rollouts.ranks)
    speed = throughput(job.cfg.cluster, num_trained_tokens, wall)
    if not job.cfg.cluster.num_rollout_ranks:
        return [speed]
    train = spans.seconds("train") + spans.seconds("sync")
    return [
        speed,
        Metric(name="run/train_idle", sum=max(0.0, wall - train), weight=wall, unit="fraction"),
        Metric(name="run/rollout_idle", sum=max(0.0, wall - busy), weight=wall, unit="fraction"),
    ]


async def finish_step(
    job: Job, trajectories: Sequence[Trajectory], metrics: list[Metric], cursor: dict[str, Any]
) -> None:
    """Log the rollouts, collect memory and time metrics, report, and count the step. cursor: the data's state for a run
    that continues after this step."""
    for device_metrics, _ in await job.trainer.memory():
        metrics += device_metrics
    metrics += memory_metrics()
    metrics.append(Metric(name="sync/latency_s", sum=job.run.spans.seconds("sync"), reduce="sum", unit="s"))
    metrics += _use_of_devices(job, sum(int(m.sum) for m in metrics if m.name == "train/num_tokens"))
    if (note := unknown_device(job.step, metrics)) is not None:
        job.run.note(note)
    metrics.append(Metric(name="train/restarts", sum=float(job.run.restarts), reduce="max", unit="restarts"))
    metrics += [*job.run.writes.take(), *job.run.spans.take()]
    if job.proof.threshold is not None:
        metrics.append(Metric(name="proof/limit", sum=job.proof.threshold, reduce="max", unit="nats"))
    rollouts, error = None, None
    try:
        rollouts = job.rollout_log.write(job.step + 1, trajectories, trainer=job.token_values)
    except (TypeError, ValueError) as e:  # an agent wrote messages that are not plain JSON: count the step first
        error = e
    job.token_values = None  # frees the samples
    values = job.run.report(job.step + 1, metrics)
    note_what_is_wrong(job, trajectories, values, rollouts)
    job.rewards.append(values.get("reward/mean", math.nan))  # NaN if no trajectory of the step has a reward
    job.step += 1
    job.cursor = cursor
    if error is not None:
        raise error
