"""Supervised fine-tuning on chat rows: the same engine, packing and denominators, with another loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.algo.losses import sft_loss
from meshrl.algo.reduce import assign_loss_weights
from meshrl.cluster.groups import TrainGroup
from meshrl.config.algo import AlgoConfig
from meshrl.config.run import SftRunConfig
from meshrl.core.types import Metric
from meshrl.data.order import SftSource
from meshrl.loops.checkpoints import Checkpoints
from meshrl.loops.resume import Start, note_resumed
from meshrl.loops.stop import Stop
from meshrl.monitor.memory import memory_metrics
from meshrl.monitor.spans import Spans
from meshrl.train.optim import learning_rate

Report = Callable[[int, Sequence[Metric]], dict[str, float]]


@dataclass(slots=True)
class SftJob:
    """One run. cursor: the data's state after the last finished step. losses: of each finished step, in nats a trained
    token."""

    cfg: SftRunConfig
    trainer: TrainGroup
    source: SftSource
    report: Report
    checkpoints: Checkpoints
    stop: Stop
    cursor: dict[str, Any]
    spans: Spans
    note: Callable[[str], None]
    chat_template: str | None = None  # the text of sft.chat_template
    restarts: int = 0
    losses: list[float] = field(default_factory=list)

    async def save(self) -> None:
        """Begin a checkpoint of the last finished step, if there is one and it is not saved yet."""
        if self.losses:
            saved = {
                "kind": "sft",
                "data": self.cursor,
                "losses": list(self.losses),
                "config": self.cfg.model_dump(mode="json"),
                "chat_template": self.chat_template,
            }
            with self.stop.saving():
                await self.checkpoints.save(len(self.losses), saved)

    async def restore(self, start: Start) -> None:
        """Put the job, and its trainer, where `save` was called. Raises: CheckpointError, DataError."""
        self.source.load_state(start.saved["data"])
        await self.trainer.load(str(start.folder), version=0)
        self.cursor, self.losses = start.saved["data"], list(start.saved["losses"])
        note_resumed(self.note, start, self.cfg.model_dump(mode="json"))


async def sft(job: SftJob) -> None:
    """Run to sft.num_steps, from the step that the job stands at."""
    cfg, trainer, loss, spans = job.cfg, job.trainer, sft_loss(), job.spans
    denominator, every = AlgoConfig(aggregation="token_mean"), cfg.sft.save_every_steps
    for step in range(len(job.losses), cfg.sft.num_steps):
        samples = job.source.next(cfg.sft.rows_per_step)
        assign_loss_weights(samples, denominator, max_new_tokens=0)
        with job.stop.updating(job.trainer):  # a checkpoint must find weights, data and metrics at the same step
            with spans("train"):
                result = await trainer.forward_backward(samples, trainer.plan(samples), loss)
                lr = learning_rate(step, cfg.sft.num_steps, cfg.train.optimizer.lr, cfg.train.scheduler)
                stepped = await trainer.optim_step(lr)
            num_tokens = sum(len(s) for s in samples)
            metrics = [
                *result.metrics,
                Metric(name="train/grad_norm", sum=stepped.grad_norm, unit="norm"),
                Metric(name="train/lr", sum=lr, unit="1/step"),
                Metric(name="train/skipped_steps", sum=float(stepped.skipped), reduce="sum", unit="steps"),
                Metric(name="train/num_tokens", sum=float(num_tokens), reduce="sum", unit="tokens"),
                Metric(name="train/tokens_per_s", sum=num_tokens, weight=spans.seconds("train"), unit="tokens/s"),
                Metric(name="train/restarts", sum=float(job.restarts), reduce="max", unit="restarts"),
                *memory_metrics(),
                *spans.take(),
            ]
            job.losses.append(job.report(step, metrics)["loss/nll"])
            job.cursor = job.source.state()
        job.checkpoints.check()
        is_over = step + 1 == cfg.sft.num_steps or job.stop.after_step
        if is_over or (every and (step + 1) % every == 0):
            with spans("save"):
                await job.save()
        if is_over:
            return
