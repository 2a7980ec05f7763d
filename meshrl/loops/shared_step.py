"""What a step of any loop has: the optimizer's update, its throughput, and a note about an unknown device."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.cluster.groups import TrainGroup
from meshrl.config.cluster import ClusterConfig
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Metric
from meshrl.train.engine import StepReport


async def optimizer_step(trainer: TrainGroup, step: int, lr: float) -> tuple[StepReport, list[Metric]]:
    """Update the weights of all train ranks. step: number of finished steps of the loop.

    Raises: MeshrlError when a weight is not finite after the update.
    """
    report = await trainer.optim_step("policy", lr)
    if report.not_finite:
        raise MeshrlError(
            f"step {step + 1}: {report.not_finite} has values that are not finite in model.dtype "
            f"{trainer.compute_dtype} after the optimizer step (learning rate {lr:g}, gradient norm "
            f"{report.grad_norm:.4g}). These weights are not used, saved or exported. Lower train.optimizer.lr, or set "
            "train.optimizer.clip to a value above 0 if it is 0, and continue from the last checkpoint with "
            "run.resume=auto"
        )
    return report, [
        Metric(name="train/grad_norm", sum=report.grad_norm, unit=""),
        Metric(name="train/lr", sum=lr, unit="1/step"),
        Metric(name="train/skipped_steps", sum=float(report.skipped), reduce="sum", unit="steps"),
    ]


def throughput(cluster: ClusterConfig, num_tokens: int, wall_s: float) -> Metric:
    """num_tokens: of the trained rows, with their prompts. wall_s: of the complete step."""
    num_devices = cluster.num_train_ranks + cluster.num_rollout_ranks
    return Metric(name="perf/throughput", sum=num_tokens, weight=wall_s * num_devices, unit="tokens/s/device")


def unknown_device(step: int, metrics: Sequence[Metric]) -> str | None:
    """A note, at the first step of a run, that there is no perf/mfu. step: number of finished steps."""
    names = {metric.name for metric in metrics}
    if step or "train/model_flops" not in names or "perf/mfu" in names:
        return None
    return (
        "perf/mfu is not reported: the peak FLOP/s of the train ranks' devices is not in the table of "
        "meshrl/model/costs.py. Divide train/model_flops by it and by the seconds of training"
    )
