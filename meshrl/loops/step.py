"""The verbs that the loops share, as plain functions: collect, annotate, update, sync, finish_step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshrl.agent.loop import AgentContext
from meshrl.algo.losses import make_policy_loss
from meshrl.algo.mismatch import sampler_mismatch
from meshrl.algo.reduce import assign_loss_weights
from meshrl.cluster.groups import RolloutGroup, sync_weights
from meshrl.config.algo import ADVANTAGE_NAMES
from meshrl.config.rollout import SamplingConfig
from meshrl.config.run import RunConfig
from meshrl.core.types import Metric, Prompt, Purpose, Sample, SamplingParams, Trajectory
from meshrl.loops.deadlines import in_time
from meshrl.loops.job import Job, Task
from meshrl.monitor.memory import memory_metrics
from meshrl.monitor.metrics import histogram
from meshrl.monitor.sinks import read_metrics
from meshrl.reward.score import Scorer
from meshrl.sync.layout import Ack
from meshrl.train.optim import learning_rate
from meshrl.train.plan import Plan


@dataclass(frozen=True, slots=True)
class Update:
    """The samples of one optimizer step and their packing plan; scoring and training use the same plan (P7)."""

    samples: list[Sample]
    plan: Plan


def sampling_params(cfg: SamplingConfig, stop_token_ids: tuple[int, ...], greedy: bool = False) -> SamplingParams:
    """The config's sampling as a request carries it."""
    return SamplingParams(
        temperature=0.0 if greedy else cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
        repetition_penalty=cfg.repetition_penalty,
        stop_token_ids=tuple(sorted({*stop_token_ids, *cfg.stop_token_ids})),
        stop=tuple(cfg.stop),
    )


async def collect(
    cfg: RunConfig,
    task: Task,
    rollouts: RolloutGroup,
    prompts: Sequence[Prompt],
    num_samples: int,
    purpose: Purpose,
    sampling: SamplingParams,
    min_version: int,
) -> list[Trajectory]:
    """num_samples attempts at each prompt, all at once; in the order of prompts and attempts."""

    def context(prompt: Prompt) -> AgentContext:
        return AgentContext(
            tokenizer=task.tokenizer,
            sampling=sampling,
            max_new_tokens=cfg.rollout.sampling.max_new_tokens,
            max_context_tokens=task.max_context_tokens,
            run_seed=cfg.run.seed,
            group_id=f"{prompt.id}@{prompt.ordinal}",
            purpose=purpose,
            min_version=min_version,
        )

    rollouts.forget_sessions()
    runs = [
        task.agent.run(prompt, index, rollouts.generate, ctx)
        for prompt, ctx in [(prompt, context(prompt)) for prompt in prompts]
        for index in range(num_samples)
    ]
    return await in_time(cfg.cluster, "eval" if purpose == "eval" else "rollout", runs)


async def grade(cfg: RunConfig, scorer: Scorer, trajectories: Sequence[Trajectory]) -> list[Metric]:
    """Rewards of the trajectories, within the deadline of the phase."""
    (metrics,) = await in_time(cfg.cluster, "reward", [scorer.score(trajectories)])
    return metrics


def split_updates(job: Job, samples: Sequence[Sample], num_updates: int) -> list[Update]:
    """Whole groups, in order, into num_updates optimizer steps of equally many groups."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    parts: list[list[Sample]] = [[] for _ in range(num_updates)]
    for i, members in enumerate(groups.values()):
        parts[i * num_updates // len(groups)].extend(members)
    return [Update(part, job.trainer.plan(part)) for part in parts if part]


async def lend(job: Job) -> list[Metric]:
    """Give the trainer the memory of the samplers on its devices, until the next sync."""
    if not job.cfg.rollout.release_memory:
        return []
    return [Metric(name="memory/lent_bytes", sum=float(await job.rollouts.lend()), reduce="sum", unit="bytes")]


async def annotate(job: Job, updates: Sequence[Update]) -> list[Metric]:
    """Fill what the algorithm asks for and nothing else: reference logprobs when a KL coefficient is above 0, old
    logprobs when the step has several updates (a single one is on-policy and needs no second forward, P7)."""
    mismatch: list[Metric] = []
    for update in updates:
        if job.cfg.algo.kl.coef > 0:
            for s, row in zip(
                update.samples, await job.trainer.forward(update.samples, update.plan, "reference"), strict=True
            ):
                s.ref_logprobs = row
        if len(updates) > 1:
            for s, row in zip(
                update.samples, await job.trainer.forward(update.samples, update.plan, "policy"), strict=True
            ):
                s.old_logprobs = row
                mismatch += sampler_mismatch(*map(torch.tensor, (s.rollout_logprobs, row, s.mask)), [len(s)])
    if mismatch:
        job.proof.check(mismatch, job.cfg.model.dtype, job.trainer.version)
    return mismatch


async def update(job: Job, updates: Sequence[Update]) -> list[Metric]:
    """One optimizer step for each Update that has a token to train, else a note. The sampler proof stands between
    gradient and step (P15)."""
    cfg, metrics = job.cfg, list[Metric]()
    loss = make_policy_loss(cfg.algo)
    total = cfg.loop.num_steps * cfg.train.updates_per_step
    for part in updates:
        if not assign_loss_weights(part.samples, cfg.algo, cfg.rollout.sampling.max_new_tokens):
            job.run.note(f"step {job.step + 1}: {_nothing_to_train(part.samples)}; this optimizer step is left out")
            continue
        report = await job.trainer.forward_backward(part.samples, part.plan, loss)
        metrics += report.metrics
        if len(updates) == 1:
            job.proof.check(report.mismatch, cfg.model.dtype, job.trainer.version)
            metrics += report.mismatch
        lr = learning_rate(job.num_updates, total, cfg.train.optimizer.lr, cfg.train.scheduler)
        step = await job.trainer.optim_step(lr)
        job.num_updates += 1
        metrics += [
            Metric(name="train/grad_norm", sum=step.grad_norm, unit=""),
            Metric(name="train/lr", sum=lr, unit="1/step"),
            Metric(name="train/skipped_steps", sum=float(step.skipped), reduce="sum", unit="steps"),
        ]
    return metrics


def _nothing_to_train(samples: Sequence[Sample]) -> str:
    cut = sum(sample.truncated for sample in samples)
    if not cut:
        return f"none of {len(samples)} rows has a sampled token"
    return (
        f"{cut} of {len(samples)} rows were cut off and algo.truncated is mask, so that no token is trained. Raise "
        "rollout.sampling.max_new_tokens (or agent.args.max_turns), or set algo.truncated to train"
    )


async def first_sync(job: Job) -> list[Metric]:
    """The one before the loop's first step; its numbers have names of their own, and go into the line of step 0. A run
    that goes on has told them before, and its lines are those of one that was never interrupted (P27)."""
    began = time.perf_counter()
    metrics = await sync(job)
    metrics.append(Metric(name="sync/latency_s", sum=time.perf_counter() - began, reduce="sum", unit="s"))
    told = metrics if job.step == 0 else []
    return [dataclasses.replace(m, name=f"first_sync/{m.name.partition('/')[2]}") for m in told]


async def sync(job: Job) -> list[Metric]:
    """Give the samplers the trainer's weights, with proofs; what it took."""
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
            Metric(name="sync/proven_resident", sum=float(ack.resident is True), unit="fraction"),
        ]
        metrics += [
            Metric(name=f"sync/{stage}_s", sum=seconds, reduce="max", unit="s")
            for stage, seconds in ack.seconds.items()
        ]
    return metrics


def _changes(job: Job, ack: Ack) -> list[Metric]:
    """How much of the weights is new: counted by the senders where they send changes, else by tensor from digests."""
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
    """Lengths and speeds of a step; what flatten and the scorer report is not repeated here."""
    turns = [turn for t in trajectories for turn in t.turns]
    sampled = sum(len(turn.output_ids) for turn in turns)
    trained = sum(len(s) for s in samples)
    rollout_s, train_s = job.run.spans.seconds("rollout"), job.run.spans.seconds("train")
    lengths = np.array([sum(len(turn.output_ids) for turn in t.turns) for t in trajectories])
    metrics = [
        histogram("rollout/length_tokens", lengths, "tokens"),
        Metric(name="rollout/num_tokens", sum=float(sampled), reduce="sum", unit="tokens"),
        Metric(name="train/num_tokens", sum=float(trained), reduce="sum", unit="tokens"),
        Metric(name="rollout/tokens_per_s", sum=sampled, weight=rollout_s, unit="tokens/s"),
        *job.rollouts.losses(),
    ]
    if train_s:
        metrics.append(Metric(name="train/tokens_per_s", sum=trained, weight=train_s, unit="tokens/s"))
    return metrics


_NO_SIGNAL = "no group has answers of different rewards, so that the rewards change no weight"


def _has_no_signal(job: Job, values: Mapping[str, float]) -> bool:
    """Whether every advantage of the step is 0. A user's own advantages may differ where the rewards do not."""
    return values.get("reward/groups_without_signal") == 1.0 and job.cfg.algo.advantage in ADVANTAGE_NAMES


def note_run_without_signal(job: Job) -> None:
    """A note at the end of a run of several steps none of which had a signal, those before a resume included."""
    lines, _ = read_metrics(job.run.folder / "metrics.jsonl")
    steps = [line.metrics for line in lines if "reward/groups_without_signal" in line.metrics]  # no evaluations
    if len(steps) > 1 and all(_has_no_signal(job, values) for values in steps):
        job.run.note(
            f"all {len(steps)} steps: {_NO_SIGNAL}. Check the rewards in {job.run.folder / 'rollouts'}; change the "
            "reward function if it can't distinguish answers, or the prompts if they are all too hard or too easy"
        )


async def finish_step(job: Job, trajectories: Sequence[Trajectory], metrics: list[Metric]) -> None:
    """Log rollouts, gather memory and times, report, count the step."""
    for device_metrics, _ in await job.trainer.memory():
        metrics += device_metrics
    metrics += memory_metrics()
    metrics.append(Metric(name="sync/latency_s", sum=job.run.spans.seconds("sync"), reduce="sum", unit="s"))
    metrics.append(Metric(name="train/restarts", sum=float(job.run.restarts), reduce="max", unit="restarts"))
    metrics += job.run.spans.take()
    if job.proof.threshold is not None:
        metrics.append(Metric(name="proof/limit", sum=job.proof.threshold, reduce="max", unit="nats"))
    rollouts = job.rollout_log.write(job.step, trajectories)
    values = job.run.report(job.step, metrics)
    if _has_no_signal(job, values) and not job.noted_no_signal:
        job.noted_no_signal = True
        job.run.note(f"step {job.step + 1}: {_NO_SIGNAL}. The answers and their rewards are in {rollouts}")
    job.rewards.append(values.get("reward/mean", math.nan))  # no trajectory of the step may have a reward
    job.step += 1
    job.cursor = job.feed.state()
