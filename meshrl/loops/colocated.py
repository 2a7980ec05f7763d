"""The synchronous schedule: sample, score, train, sync, in sequence; all samples come from the current weights."""

from __future__ import annotations

from meshrl.loops.collect import next_batch
from meshrl.loops.evaluate import evaluate_if_due
from meshrl.loops.finish_step import finish_step
from meshrl.loops.job import Job
from meshrl.loops.sync_and_probe import first_sync, sync
from meshrl.loops.train_step import train_step


async def colocated(job: Job) -> None:
    """Run until the job is over, from its current step. Evaluates before the first step and after the last, if there
    are held-out prompts."""
    keeper, loop = job.keeper, job.cfg.loop
    start = await first_sync(job)
    while True:
        await evaluate_if_due(job)
        await keeper.save_if_due(job, loop.save_every_steps, True, loop.eval_every_steps)
        if job.is_over:
            return
        batch = await next_batch(job)
        metrics, start = start + batch.metrics, []
        with keeper.updating(job):
            metrics += await train_step(job, batch.trained, batch.replaced)
            metrics += await sync(job)
            await finish_step(job, batch.answers, metrics, batch.cursor)
