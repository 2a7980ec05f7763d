"""Supervised fine-tuning on chat rows: the same engine, packing and denominators, with another loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshrl.algo.losses import sft_loss
from meshrl.algo.reduce import assign_loss_weights
from meshrl.cluster.groups import TrainGroup
from meshrl.config.algo import AlgoConfig
from meshrl.config.run import SftRunConfig
from meshrl.core.types import Metric
from meshrl.data.sampler import SftSource
from meshrl.monitor.memory import memory_metrics
from meshrl.monitor.spans import Spans
from meshrl.train.optim import learning_rate

Report = Callable[[int, Sequence[Metric]], dict[str, float]]


async def sft(cfg: SftRunConfig, trainer: TrainGroup, source: SftSource, report: Report) -> list[float]:
    """Run to sft.num_steps and return the loss of each step, in nats a trained token."""
    loss, spans, losses = sft_loss(), Spans(), list[float]()
    denominator = AlgoConfig(aggregation="token_mean")
    for step in range(cfg.sft.num_steps):
        samples = source.next(cfg.sft.rows_per_step)
        assign_loss_weights(samples, denominator, max_new_tokens=0)
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
            *memory_metrics(),
            *spans.take(),
        ]
        losses.append(report(step, metrics)["loss/nll"])
    return losses
