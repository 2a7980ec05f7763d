"""The asynchronous schedule: samplers work all the time, a step trains on the groups that have finished, and new
weights arrive while others are sampled; each token has its own version."""

from __future__ import annotations

from meshrl.loops.buffer import GroupBuffer
from meshrl.loops.evaluate import evaluate_if_due
from meshrl.loops.finish_step import finish_step
from meshrl.loops.job import Job
from meshrl.loops.sync_and_probe import first_sync, probe_result, sync
from meshrl.loops.train_step import train_step


async def fully_async(job: Job) -> None:
    """Run until the job is over, from its current step. No sync comes before the requests of an evaluation have ended,
    because the loop waits for it."""
    run, keeper, loop = job.run, job.keeper, job.cfg.loop
    metrics = await first_sync(job)
    async with GroupBuffer(job) as buffer:
        while True:
            await evaluate_if_due(job)
            await keeper.save_if_due(job, loop.save_every_steps, True, loop.eval_every_steps)
            if job.is_over:
                await probe_result(job)
                return
            with run.spans("wait"):
                batch = await buffer.take()
            metrics += batch.metrics
            with keeper.updating(job):
                metrics += await train_step(job, batch.trained, batch.replaced)
                metrics += await sync(job) + buffer.metrics()
                await finish_step(job, batch.answers, metrics, buffer.cursor())
            metrics = []
