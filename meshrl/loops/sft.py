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
from meshrl.core.types import Metric
from meshrl.data.order import SftSource
from meshrl.loops.finish_step import throughput, unknown_device
from meshrl.loops.job import LoopKeeper, LoopOutputs
from meshrl.loops.train_step import optimizer_step
from meshrl.monitor.metrics import memory_metrics
from meshrl.train.optim import learning_rate


@dataclass(kw_only=True, slots=True)
class SftJob:
    """The state of the loop. cursor: the data's state after the last finished step. losses: of each finished step, in
    nats per trained token."""

    cfg: SftRunConfig
    run: LoopOutputs
    keeper: LoopKeeper
    trainer: TrainGroup
    source: SftSource
    cursor: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def is_over(self) -> bool:
        return self.step >= self.cfg.sft.num_steps or self.run.ends_early

    def snapshot(self) -> dict[str, Any]:
        return {"data": self.cursor, "losses": list(self.losses)}

    async def restore(self, step: int, saved: dict[str, Any], state: Path | None) -> None:
        self.source.load_state(saved["data"])
        await self.trainer.load(state, version=0)
        self.cursor, self.losses = saved["data"], list(saved["losses"])


async def sft(job: SftJob) -> None:
    """Run until the job is over, from its current step."""
    cfg, trainer, loss, spans = job.cfg, job.trainer, sft_loss, job.run.spans
    denominator = AlgoConfig(aggregation="token_mean")
    start = time.perf_counter()
    while True:
        await job.keeper.save_if_due(job, cfg.sft.save_every_steps, with_model=job.is_over)
        if job.is_over:
            return
        samples = job.source.next(cfg.sft.rows_per_step)
        assign_loss_weights(samples, denominator, max_new_tokens=0)
        with job.keeper.updating(job):
            with spans("train"):
                result = await trainer.forward_backward(trainer.plan_rows(samples), "policy", loss)
                lr = learning_rate(job.step, cfg.sft.num_steps, cfg.peak_lr, cfg.train.scheduler)
                _, of_the_step = await optimizer_step(trainer, job.step, lr)
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
            now = time.perf_counter()
            metrics.append(throughput(cfg.cluster, num_tokens, now - start))
            start = now
            if (note := unknown_device(job.step, metrics)) is not None:
                job.run.note(note)
            job.losses.append(job.run.report(job.step + 1, metrics)["loss/nll"])
            job.cursor = job.source.state()
