"""The synchronous schedule: sample, score, train, sync, in sequence; all samples come from the current weights."""

from __future__ import annotations

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.loops.evaluate import evaluate_if_due
from meshrl.loops.job import Job
from meshrl.loops.step import (
    annotate,
    collect,
    finish_step,
    first_sync,
    grade,
    release_samplers,
    rollout_metrics,
    sampling_params,
    split_updates,
    sync,
    update,
)


async def colocated(job: Job) -> None:
    """Run until the job is over, from its current step. Evaluates before the first step and after the last, if there
    are held-out prompts."""
    cfg, task, run = job.cfg, job.task, job.run
    spans = run.spans
    sampling = sampling_params(cfg.rollout.sampling, task.stop_token_ids)
    start = await first_sync(job)
    while True:
        await evaluate_if_due(job)
        await run.save_if_due(job, cfg.loop.save_every_steps, with_model=True)
        if job.is_over:
            return
        prompts = job.feed.next(cfg.loop.prompts_per_step)
        with spans("rollout"):
            trajectories = await collect(
                cfg,
                task,
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
        with run.updating(job.trainer):
            if samples:
                with spans("train"):
                    metrics += await release_samplers(job)
                    updates = split_updates(job, samples, cfg.train.updates_per_step)
                    metrics += await annotate(job, updates)
                    metrics += assign_advantages(samples, cfg.algo)
                    metrics += await update(job, updates)
                with spans("sync"):
                    metrics += await sync(job)
            else:
                count = len(trajectories)
                run.note(f"step {job.step + 1}: none of {count} trajectories has a reward; nothing to train on")
            metrics += rollout_metrics(job, trajectories, samples)
            await finish_step(job, trajectories, metrics)
