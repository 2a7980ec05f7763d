"""The synchronous schedule: sample, score, train, sync, one after the other; every sample is of the current weights."""

from __future__ import annotations

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.loops.evaluate import evaluate_if_due
from meshrl.loops.job import Job
from meshrl.loops.resume import save_if_due
from meshrl.loops.step import (
    annotate,
    collect,
    finish_step,
    first_sync,
    grade,
    lend,
    rollout_metrics,
    sampling_params,
    split_updates,
    sync,
    update,
)


async def colocated(job: Job) -> None:
    """Run until the job is over, from the step that it stands at. Evaluates before the first step and after the last,
    if there are held-out prompts."""
    cfg, task, spans = job.cfg, job.task, job.spans
    sampling = sampling_params(cfg.rollout.sampling, task.stop_token_ids)
    assert task.train_prompts is not None, "training needs data.path"
    start = await first_sync(job)
    while True:
        await evaluate_if_due(job)
        await save_if_due(job)
        if job.is_over:
            return
        prompts = task.train_prompts.next(cfg.loop.prompts_per_step)
        with spans("rollout"):
            trajectories = await collect(
                cfg,
                job.task,
                job.rollouts,
                prompts,
                cfg.loop.samples_per_prompt,
                "train",
                sampling,
                job.trainer.version,
            )
        with spans("reward"):
            metrics, start = start + await grade(cfg, job.scorer, trajectories), []
        samples, flat_metrics = flatten(trajectories)
        metrics += flat_metrics
        with job.stop.updating(job.trainer):  # a checkpoint must find weights, data and metrics at the same step
            if samples:
                with spans("train"):
                    metrics += await lend(job)
                    updates = split_updates(job, samples, cfg.train.updates_per_step)
                    metrics += await annotate(job, updates)
                    metrics += assign_advantages(samples, cfg.algo)
                    metrics += await update(job, updates)
                with spans("sync"):
                    metrics += await sync(job)
            else:
                count = len(trajectories)
                job.note(f"step {job.step + 1}: none of {count} trajectories has a reward; nothing to train on")
            metrics += rollout_metrics(job, trajectories, samples)
            await finish_step(job, trajectories, metrics)
