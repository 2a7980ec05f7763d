"""One optimizer step of any loop: its metrics, and the end of the run if it leaves weights that are not finite."""

from __future__ import annotations

from meshrl.cluster.groups import TrainGroup
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
