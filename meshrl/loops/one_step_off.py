"""The schedule in which each batch is sampled while the previous one is trained, on different ranks.

Step k: sync version k, then train on batch k while batch k + 1 is sampled with version k. So each batch has one
version, and is trained one version later. With loop.max_staleness 0 a batch is sampled after the previous one was
trained, as by `colocated`.
"""

from __future__ import annotations

import asyncio

from meshrl.loops.collect import ScoredBatch, next_batch
from meshrl.loops.evaluate import evaluate_if_due
from meshrl.loops.finish_step import finish_step
from meshrl.loops.job import Job
from meshrl.loops.sync_and_probe import first_sync, probe_result, sync
from meshrl.loops.train_step import train_step


async def one_step_off(job: Job) -> None:
    """Run until the job is over, from its current step. Evaluates and saves between a sync and the next batch."""
    run, keeper, loop = job.run, job.keeper, job.cfg.loop
    metrics = await first_sync(job)
    ahead: asyncio.Task[ScoredBatch] | None = None
    try:
        while True:
            await evaluate_if_due(job)
            await keeper.save_if_due(job, loop.save_every_steps, True, loop.eval_every_steps)
            if job.is_over:
                await probe_result(job)
                return
            with run.spans("wait"):
                batch = await (ahead or next_batch(job))
            ahead = None
            if loop.staleness and job.step + 1 < loop.num_steps:
                ahead = asyncio.create_task(next_batch(job))
            with keeper.updating(job):
                metrics += batch.metrics + await train_step(job, batch.trained, batch.replaced)
                await finish_step(job, batch.answers, metrics, batch.cursor)
            metrics = []
            if ahead is not None and not job.is_over:
                with run.spans("wait"):
                    if await _needs_sync(job, ahead):
                        metrics += await sync(job)
                    await asyncio.wait({ahead})
            metrics += await sync(job)
    finally:
        if ahead is not None:  # the run ends early, or by an error
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)


async def _needs_sync(job: Job, ahead: asyncio.Task[ScoredBatch]) -> bool:
    """Wait until the batch is sampled. Returns True before that if a sampler was replaced and waits for weights: the
    trainer does not have the version any more with which the batch was started."""
    needs = asyncio.ensure_future(job.rollouts.replacement.needs_sync.wait())
    try:
        done, _ = await asyncio.wait({ahead, needs}, return_when=asyncio.FIRST_COMPLETED)
        return ahead not in done
    finally:
        needs.cancel()
