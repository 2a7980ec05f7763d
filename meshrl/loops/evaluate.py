"""Evaluation on held-out prompts: mean@k and pass@k of the first reward term. k = 1 is one greedy answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.cluster.groups import RolloutGroup
from meshrl.config.run import RunConfig
from meshrl.core.types import Metric, Trajectory
from meshrl.loops.job import Job, Task
from meshrl.loops.step import check_failures, collect, grade
from meshrl.reward.score import Scorer


def eval_metrics(trajectories: Sequence[Trajectory], cfg: RunConfig) -> list[Metric]:
    """mean@k: mean of the term over all attempts. pass@k: fraction of prompts with an attempt that scores 1 or more.

    A failed attempt scores 0 here and is counted: failures must not improve the score.
    """
    term = next(iter(cfg.reward.terms))
    scores: dict[str, list[float]] = {}
    failed = 0
    for t in trajectories:
        value = t.rewards.get(term)
        failed += not isinstance(value, (int, float))
        scores.setdefault(t.group_id, []).append(float(value) if isinstance(value, (int, float)) else 0.0)
    rows = [np.array(v) for v in scores.values()]
    lengths = [sum(len(turn.output_ids) for turn in t.turns) for t in trajectories]
    return [
        Metric(name="eval/mean_at_k", sum=float(sum(r.mean() for r in rows)), weight=len(rows), unit="score"),
        Metric(name="eval/pass_at_k", sum=float(sum(r.max() >= 1 for r in rows)), weight=len(rows), unit="fraction"),
        Metric(name="eval/length_mean_tokens", sum=float(sum(lengths)), weight=len(lengths), unit="tokens"),
        Metric(name="eval/num_prompts", sum=float(len(rows)), reduce="sum", unit="prompts"),
        Metric(name="eval/num_failed", sum=float(failed), reduce="sum", unit="attempts"),
    ]


async def evaluate_prompts(
    cfg: RunConfig, task: Task, rollouts: RolloutGroup, scorer: Scorer, min_version: int
) -> tuple[list[Trajectory], list[Metric]]:
    """Answer and score every held-out prompt with the samplers' current weights."""
    trajectories = await collect(cfg, task, rollouts, task.eval_prompts, "eval", min_version)
    await grade(cfg, scorer, trajectories)
    check_failures(cfg, scorer, trajectories)
    return trajectories, eval_metrics(trajectories, cfg)


async def evaluate_if_due(job: Job) -> None:
    """Evaluate before the first step, after the last and every loop.eval_every_steps, each once, if there are held-out
    prompts. The metrics go to the sinks under the last finished step, the answers to a file. With loop.save_best the
    model is saved if it is the best so far."""
    every, done = job.cfg.loop.eval_every_steps, bool(job.evals) and job.evals[-1][0] == job.step
    due = job.step == 0 or job.is_over or (every and job.step % every == 0)
    run = job.run
    if done and job.cfg.loop.save_best:
        await run.keep_best(*job.evals[-1])  # the run may have ended before the model was written
    if done or not due or not job.task.eval_prompts:
        return
    with run.spans("eval"):
        trajectories, metrics = await evaluate_prompts(job.cfg, job.task, job.rollouts, job.scorer, job.trainer.version)
    job.rollout_log.write(job.step, trajectories, name="eval")
    values = run.report(job.step, metrics + run.spans.take("eval"))
    job.evals.append((job.step, values["eval/mean_at_k"]))
    k = job.cfg.loop.eval_samples
    how = "greedy" if k == 1 else f"{k} samples each"
    run.note(
        f"eval after {job.step} steps: mean@{k} {values['eval/mean_at_k']:.3f}, pass@{k} "
        f"{values['eval/pass_at_k']:.3f} on {len(job.task.eval_prompts)} held-out prompts ({how})"
    )
    if job.cfg.loop.save_best:
        await run.keep_best(job.step, values["eval/mean_at_k"])
