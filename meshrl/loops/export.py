"""Writing the policy as a folder that `from_pretrained` loads, beside the state of the run it belongs to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from meshrl.cluster.groups import TrainGroup
from meshrl.loops.job import Job


def model_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}" / "model"


async def export_model(job: Job) -> Path:
    """The policy as it is after `job.step` steps, in the compute dtype, with its tokenizer."""
    path = model_folder(job.folder, job.step)
    await export_to(job.trainer, path, job.cfg.model.path)
    job.note(f"wrote {path}")
    return path


async def export_to(trainer: TrainGroup, path: Path, tokenizer_from: str) -> None:
    """Write aside, then rename: a folder of this name is always whole."""
    aside = path.with_name(path.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    await trainer.export(str(aside), tokenizer_from)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(aside, path)
