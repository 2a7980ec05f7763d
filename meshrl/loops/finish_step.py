"""The end of a step: its metrics, its record of rollouts, its report; and the reason if a run has learned nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshrl.agent.attempt import crash_note
from meshrl.agent.flatten import context_lengths
from meshrl.config.cluster import ClusterConfig
from meshrl.config.kinds import compares_groups
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Metric, Sample, Trajectory
from meshrl.loops.job import Job
from meshrl.monitor.metrics import histogram, memory_metrics
from meshrl.monitor.sinks import read_metrics
from meshrl.plan.decisions import CACHE_LIMIT


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
    if job.task.agent.tools:
        answered = sum(m.get("role") == "tool" for t in trajectories for turn in t.turns for m in turn.messages)
        metrics.append(Metric(name="rollout/tool_calls_mean", sum=answered, weight=len(trajectories), unit="calls"))
    if rollout_s:  # 0 if all groups of an overlapped step were sampled before the previous one ended
        metrics.append(Metric(name="rollout/tokens_per_s", sum=sampled, weight=rollout_s, unit="tokens/s"))
    if train_s:
        metrics.append(Metric(name="train/tokens_per_s", sum=trained, weight=train_s, unit="tokens/s"))
    return metrics


def request_times(trajectories: Sequence[Trajectory]) -> list[Metric]:
    """How long turns waited in their engine's queue, and until their first token; the share of the agents' waiting in
    which no engine computed; and the share of contexts that engines had in their caches. Each is absent if it is not
    known."""
    times = [turn.times for trajectory in trajectories for turn in trajectory.turns]
    queue = np.array([t.queue_s for t in times])
    first_token = queue + np.array([t.prefill_s for t in times])
    metrics = []
    for name, longest, seconds in (
        ("rollout/queue_s", "rollout/queue_max_s", queue),
        ("rollout/first_token_s", "rollout/first_token_max_s", first_token),
    ):
        if seconds.any():
            metrics += [
                histogram(name, seconds, "s"),
                Metric(name=longest, sum=float(seconds.max()), reduce="max", unit="s"),
            ]
    computed, total = sum(t.prefill_s + t.decode_s for t in times), sum(t.total_s for t in times)
    if computed and total:
        idle = max(0.0, total - computed)
        metrics.append(Metric(name="rollout/agent_idle", sum=idle, weight=total, unit="fraction"))
    if cached := sum(t.cached_tokens for t in times):
        contexts = sum(sum(context_lengths(trajectory.turns)) for trajectory in trajectories)
        metrics.append(Metric(name="rollout/cached_fraction", sum=cached, weight=contexts, unit="fraction"))
    return metrics


async def finish_step(
    job: Job, trajectories: Sequence[Trajectory], metrics: list[Metric], cursor: dict[str, Any]
) -> None:
    """Log the rollouts, collect memory and time metrics, report, and count the step. cursor: the data's state for a run
    that continues after this step."""
    with job.run.spans("log"):
        metrics += [*await job.trainer.memory(), *memory_metrics()]
        metrics.append(Metric(name="sync/latency_s", sum=job.run.spans.seconds("sync"), reduce="sum", unit="s"))
        now, spans = time.perf_counter(), job.run.spans
        wall, job.step_started_at = now - job.step_started_at, now
        busy = job.rollouts.routes.take_busy_s() / len(job.rollouts.routes.ranks)
        num_trained = sum(int(m.sum) for m in metrics if m.name == "train/num_tokens")
        metrics.append(throughput(job.cfg.cluster, num_trained, wall))
        if job.cfg.cluster.num_rollout_ranks:  # the fraction of a step in which each side had nothing to do
            took = spans.seconds("train") + spans.seconds("sync")
            metrics.append(Metric(name="run/train_idle", sum=max(0.0, wall - took), weight=wall, unit="fraction"))
            metrics.append(Metric(name="run/rollout_idle", sum=max(0.0, wall - busy), weight=wall, unit="fraction"))
        if (note := unknown_device(job.step, metrics)) is not None:
            job.run.note(note)
        if CACHE_LIMIT.key not in job.noted:
            job.noted.add(CACHE_LIMIT.key)
            if (limit := await job.rollouts.kv_cache_bytes()) is not None:
                job.run.record(f"decided: {CACHE_LIMIT.key} {replace(CACHE_LIMIT, value=limit).shown}")
        metrics.append(Metric(name="train/restarts", sum=float(job.keeper.restarts), reduce="max", unit="restarts"))
        metrics += [*job.run.writes.take(), *job.run.spans.take()]
        if job.proof.threshold is not None:
            metrics.append(Metric(name="proof/limit", sum=job.proof.threshold, reduce="max", unit="nats"))
        error = None
        try:
            job.rollout_log.write(job.step + 1, trajectories, trainer=job.token_values)
        except (TypeError, ValueError) as e:  # an agent wrote messages that are not plain JSON: count the step first
            error = e
        job.token_values = None  # frees the samples
        job.run.record_step(job.step + 1, job.record)
        values = job.run.report(job.step + 1, metrics)
        if "crashes" not in job.noted and (note := crash_note(trajectories, job.cfg.agent.kind)) is not None:
            job.noted.add("crashes")
            for line in f"step {job.step + 1}: {note}".splitlines():
                job.run.note(line)
        job.rewards.append(values.get("reward/mean", math.nan))  # NaN if no trajectory of the step has a reward
        job.step += 1
        job.cursor = cursor
    if error is not None:
        raise error


def throughput(cluster: ClusterConfig, num_tokens: int, wall_s: float) -> Metric:
    """num_tokens: of the trained rows, with their prompts. wall_s: of the complete step."""
    num_devices = cluster.num_train_ranks + cluster.num_rollout_ranks
    return Metric(name="perf/throughput", sum=num_tokens, weight=wall_s * num_devices, unit="tokens/s/device")


def unknown_device(step: int, metrics: Sequence[Metric]) -> str | None:
    """A note, at the first step of a run, that there is no perf/mfu. step: number of finished steps."""
    names = {metric.name for metric in metrics}
    if step or "train/model_flops" not in names or "perf/mfu" in names:
        return None
    return (
        "perf/mfu is not reported: the peak FLOP/s of the train ranks' devices is not in the table of "
        "meshrl/model/costs.py. Divide train/model_flops by it and by the seconds of training"
    )


NO_SIGNAL = "no group has answers with different rewards, so the rewards change no weight"


def run_without_signal(job: Job) -> str | None:
    """Why nothing was learned, if no step of the run has changed a weight by its rewards; else None. Steps before a
    resume count, too. None also if the metrics can't be read."""
    try:
        lines, _ = read_metrics(job.run.folder / "metrics.jsonl")
    except MeshrlError:
        return None
    steps = [line.metrics for line in lines if "train/num_tokens" in line.metrics]  # without evaluations
    of = f"all {len(steps)} steps" if len(steps) > 1 else "the step"
    if all(_has_no_signal(job, values) or not values["train/num_tokens"] for values in steps):
        rollouts = job.run.folder / "rollouts"
        place = f"in {rollouts}" if rollouts.exists() else "of a run with monitor.rollout_log_every_steps=1"
        cause = NO_SIGNAL if any(values["train/num_tokens"] for values in steps) else "no answer was trained"
        advice = f"Check the rewards {place}; change the reward function if it does not distinguish answers, or the "
        advice += "prompts if all are too hard or too easy"
        if all(values.get("reward/mean") == 0 for values in steps):
            advice += ". No answer has a reward above 0: if the model can't do the task yet, `meshrl sft` on rows with "
            advice += "right answers teaches it first (docs/sft.md)"
        return f"{of}: {cause}. {advice}" if steps else None
    for name, text in (("train/grad_norm", "every gradient is 0"), ("train/lr", "the learning rate is 0")):
        if not any(values.get(name) for values in steps):
            return f"{of}: {text}, so no weight has changed"
    return None


def _has_no_signal(job: Job, values: Mapping[str, float]) -> bool:
    """Whether every advantage of the step is 0. A user's own advantages may differ where the rewards do not."""
    return values.get("reward/groups_without_signal") == 1.0 and all(
        map(compares_groups, job.cfg.algo.advantages.values())
    )
