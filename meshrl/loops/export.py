"""Writing the policy as a folder that `from_pretrained` loads, beside the state of the run it belongs to."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.cluster.groups import TrainGroup
from meshrl.config.loop import LoopConfig
from meshrl.core.errors import CheckpointError
from meshrl.core.files import replacing, write_text
from meshrl.loops.job import Job
from meshrl.train.checkpoint_files import read_controller, require_space, states

_ANY_BUCKET_BYTES = 1 << 20  # how a layout is cut does not change what it adds up to
_BESIDE_BYTES = 64 << 20  # a model's config, tokenizer and headers


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
        await export_to(job.trainer, path, job.cfg.model.path, given_template(job))
        job.exported_step = job.step
        job.note(f"wrote {path}")
    return path


async def export_to(trainer: TrainGroup, path: Path, tokenizer_from: str, chat_template: str | None = None) -> None:
    """Write aside, then rename: a folder of this name is always whole. chat_template: replaces the tokenizer's own.

    Raises: CheckpointError for want of room.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    needed = (await trainer.layout(_ANY_BUCKET_BYTES)).total_bytes + _BESIDE_BYTES
    if trainer.executor.specs[0].model.lora.enabled:
        needed += await trainer.state_bytes()  # the adapters by themselves are a third of that
    require_space(path.parent, needed, "a model")
    with replacing(path) as aside:
        await trainer.export(str(aside), tokenizer_from)
        write_template(aside, chat_template)
        shutil.rmtree(path, ignore_errors=True)


def given_template(job: Job) -> str | None:
    """The text of data.chat_template; None where the tokenizer's own template is used."""
    text: str | None = job.task.tokenizer.chat_template if job.cfg.data.chat_template is not None else None
    return text


def write_template(model: Path, text: str | None) -> None:
    """Replace the chat template in a written model's folder; None = the one of its tokenizer stays."""
    if text is not None:  # Transformers prefers this file to what tokenizer_config.json may hold
        (model / "chat_template.jinja").write_text(text, encoding="utf-8", newline="")


async def keep_best(job: Job, score: float) -> None:
    """If no score of the run was as high: write the policy, name it in checkpoints/best.json, and remove models that
    are beaten, unless the run saves them anyway or a checkpoint names them as its best. Before the first step the best
    model is the one the run began with.

    best.json always names a whole model: it is replaced after the new one is written and before an old one goes. It
    is a file and not a link, so that it survives copies, archives and file systems without links.
    """
    beaten = best_facts(job.folder)
    if math.isnan(score) or (beaten is not None and score <= beaten["score"]):
        return
    path = _best_file(job.folder)
    model = job.cfg.model.path
    if job.step:  # relative, so that the run's folder may move
        model = os.path.relpath(await export_model(job), path.parent)
    steps = [*beaten.get("beaten", ()), beaten["step"]] if beaten is not None else []
    await job.checkpoints.settle()  # the one under way may name a model that is beaten now
    needed = {step for step in steps if _is_needed(job, step)}
    _write_best(job.folder, {"step": job.step, "score": score, "model": model, "beaten": sorted(needed)})
    for step in {*steps} - needed - {0, job.step}:
        folder = model_folder(job.folder, step)
        if not _saved_anyway(job.cfg.loop, step):
            shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def _is_needed(job: Job, step: int) -> bool:
    """Whether a run that goes on from one of its checkpoints finds there that the model of `step` is its best."""
    for _, folder in states(job.folder / "checkpoints") if step else ():
        try:
            best = read_controller(folder).get("best")
        except CheckpointError:  # damaged: no run goes on from there
            continue
        if best is not None and best["step"] == step:
            return True
    return False


def cut_back_best(run: Path, step: int, best: dict[str, Any] | None) -> None:
    """If the run found its best model after its first `step` steps: what it knew then, `best`, is true again. The
    models that it beat since then are kept until it is beaten anew."""
    now = best_facts(run)
    if now is None or now["step"] <= step:
        return
    if best is None:
        _best_file(run).unlink()
    else:
        _write_best(run, best)


def read_best(run: Path) -> Best | None:
    """What a run's checkpoints/best.json says; None before its first evaluation."""
    said = best_facts(run)
    if said is None:
        return None
    model = str(_best_file(run).parent / said["model"]) if said["step"] else said["model"]
    return Best(said["step"], said["score"], model)


def best_facts(run: Path) -> dict[str, Any] | None:
    """best.json as it stands: step, score, model, and beaten: steps whose models wait for a checkpoint to go."""
    path = _best_file(run)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _write_best(run: Path, facts: dict[str, Any]) -> None:
    path = _best_file(run)
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(facts) + "\n")


def _best_file(run: Path) -> Path:
    return run / "checkpoints" / "best.json"


def _saved_anyway(loop: LoopConfig, step: int) -> bool:
    return step == loop.num_steps or bool(loop.save_every_steps and step % loop.save_every_steps == 0)
