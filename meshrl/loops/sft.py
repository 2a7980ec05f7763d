"""Supervised fine-tuning (SFT) on chat rows: the same engine, packing and denominators, with another loss."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.algo.losses import sft_loss
from meshrl.algo.reduce import assign_loss_weights
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.algo import AlgoConfig
from meshrl.config.run import SftRunConfig
from meshrl.core.terminal import counted
from meshrl.core.types import Metric, Sample
from meshrl.data.order import SftSource
from meshrl.loops.finish_step import throughput, unknown_device
from meshrl.loops.job import LoopKeeper, LoopOutputs
from meshrl.loops.train_step import optimizer_step
from meshrl.monitor.metrics import memory_metrics
from meshrl.train.optim import learning_rate


@dataclass(slots=True)
class SftJob:
    """The state of the loop. cursor: the data's state after the last finished step. losses: of each finished step, in
    nats per trained token. held_out_losses: by the number of finished steps."""

    cfg: SftRunConfig
    run: LoopOutputs
    keeper: LoopKeeper
    trainer: TrainGroup
    source: SftSource
    held_out: list[Sample]
    cursor: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    held_out_losses: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def is_over(self) -> bool:
        return self.step >= self.cfg.sft.num_steps or self.run.ends_early

    def snapshot(self) -> dict[str, Any]:
        return {"data": self.cursor, "losses": list(self.losses), "held_out_losses": dict(self.held_out_losses)}

    async def restore(self, step: int, saved: dict[str, Any], state: Path | None) -> None:
        self.source.load_state(saved["data"])
        await self.trainer.load(state, version=0)
        self.cursor, self.losses = saved["data"], list(saved["losses"])
        self.held_out_losses = saved.get("held_out_losses", {})  # not in checkpoints of earlier versions


async def held_out_loss(job: SftJob) -> None:
    """Compute, note and report the loss on the held-out rows after the last finished step, unless it is recorded. A
    signal waits at most for the rows of one step."""
    step, rows, most = str(job.step), job.held_out, job.cfg.sft.rows_per_step
    if not rows or step in job.held_out_losses:
        return
    total, count, num_rows = 0.0, sum(int(row.mask.sum()) for row in rows), counted(len(rows), "row")
    with job.run.spans("eval"):
        for first in range(0, len(rows), most):
            job.run.progress(f"{first} of {num_rows}")
            part = job.trainer.plan_rows(rows[first : first + most])
            total -= sum(float(logprobs.sum()) for logprobs in (await job.trainer.forward(part, "policy")).values())
    job.held_out_losses[step] = total / count
    after = f"after {counted(job.step, 'step')}" if job.step else "before training"
    job.run.note(f"held-out loss {after}: {total / count:.4f} nats a token, {num_rows}")
    loss = Metric(name="eval/loss", sum=total, weight=count, unit="nats")
    with job.run.spans("log"):
        job.run.report(job.step, [loss, *job.run.spans.take("eval")], evaluation={})


async def sft(job: SftJob) -> None:
    """Run until the job is over, from its current step."""
    cfg, trainer, loss, spans = job.cfg, job.trainer, sft_loss, job.run.spans
    denominator = AlgoConfig(aggregation="token_mean")
    while True:
        every, start = cfg.sft.eval_every_steps, time.perf_counter()
        if job.step == 0 or job.is_over or (every and job.step % every == 0):
            await held_out_loss(job)
        await job.keeper.save_if_due(job, cfg.sft.save_every_steps, with_model=job.is_over)
        if job.is_over:
            return
        with spans("data"):
            samples = job.source.next(cfg.sft.rows_per_step)
            assign_loss_weights(samples, denominator, max_new_tokens=0)
        with spans("batch_plan"):
            rows = trainer.plan_rows(samples)
        with job.keeper.updating(job):
            with spans("train"):
                result = await trainer.forward_backward(rows, "policy", loss)
                lr = learning_rate(job.step, cfg.sft.num_steps, cfg.peak_lr, cfg.train.scheduler)
                _, of_the_step = await optimizer_step(trainer, job.step, lr)
            with spans("log"):
                num_tokens = sum(len(s) for s in samples)
                metrics = [
                    *result.metrics,
                    *of_the_step,
                    Metric(name="train/num_tokens", sum=float(num_tokens), reduce="sum", unit="tokens"),
                    Metric(name="train/tokens_per_s", sum=num_tokens, weight=spans.seconds("train"), unit="tokens/s"),
                    Metric(name="train/restarts", sum=float(job.keeper.restarts), reduce="max", unit="restarts"),
                    *memory_metrics(),
                    *job.run.writes.take(),
                    *spans.take(),
                    *await trainer.memory(),
                ]
                metrics.append(throughput(cfg.cluster, num_tokens, time.perf_counter() - start))
                if (note := unknown_device(job.step, metrics)) is not None:
                    job.run.note(note)
                job.losses.append(job.run.report(job.step + 1, metrics)["loss/nll"])
                job.cursor = job.source.state()
