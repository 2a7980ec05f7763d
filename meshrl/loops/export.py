"""Writing the policy as a folder that `from_pretrained` loads, beside the state of the run it belongs to."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from meshrl.cluster.groups import TrainGroup
from meshrl.config.task import LoopConfig
from meshrl.loops.job import Job


@dataclass(frozen=True, slots=True)
class Best:
    """The highest held-out score of a run, the finished steps it was reached after, and the model: its folder, or
    for step 0 what model.path says."""

    step: int
    score: float
    model: str


def model_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}" / "model"


async def export_model(job: Job) -> Path:
    """The policy as it is after `job.step` steps, in the compute dtype, with its tokenizer; written once a step."""
    path = model_folder(job.folder, job.step)
    if job.exported_step != job.step:
        await export_to(job.trainer, path, job.cfg.model.path)
        job.exported_step = job.step
        job.note(f"wrote {path}")
    return path


async def export_to(trainer: TrainGroup, path: Path, tokenizer_from: str) -> None:
    """Write aside, then rename: a folder of this name is always whole."""
    aside = path.with_name(path.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    await trainer.export(str(aside), tokenizer_from)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(aside, path)


async def keep_best(job: Job, score: float) -> None:
    """If no score of the run was as high: write the policy, name it in checkpoints/best.json, and remove the model it
    beats, unless the run saves that one anyway. Before the first step the best model is the one the run began with.

    best.json always names a whole model: it is replaced after the new one is written and before the old one goes. It
    is a file and not a link, so that it survives copies, archives and file systems without links.
    """
    beaten = read_best(job.folder)
    if math.isnan(score) or (beaten is not None and score <= beaten.score):
        return
    path = _best_file(job.folder)
    path.parent.mkdir(exist_ok=True)
    model = job.cfg.model.path
    if job.step:  # relative, so that the run's folder may move
        model = os.path.relpath(await export_model(job), path.parent)
    aside = path.with_suffix(".aside")
    aside.write_text(json.dumps({"step": job.step, "score": score, "model": model}) + "\n", encoding="utf-8")
    os.replace(aside, path)
    if beaten is not None and beaten.step and not _saved_anyway(job.cfg.loop, beaten.step):
        folder = Path(beaten.model)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def read_best(run: Path) -> Best | None:
    """What a run's checkpoints/best.json says; None before its first evaluation."""
    path = _best_file(run)
    if not path.exists():
        return None
    said = json.loads(path.read_text(encoding="utf-8"))
    model = str(path.parent / said["model"]) if said["step"] else said["model"]
    return Best(said["step"], said["score"], model)


def _best_file(run: Path) -> Path:
    return run / "checkpoints" / "best.json"


def _saved_anyway(loop: LoopConfig, step: int) -> bool:
    return step == loop.num_steps or bool(loop.save_every_steps and step % loop.save_every_steps == 0)
