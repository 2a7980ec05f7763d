"""The models that a run writes, as folders that `from_pretrained` loads, and the choice of the best one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.core.errors import CheckpointError
from meshrl.core.files import CONTINUE_LATER, Unreadable, output_errors, read_json, replacing
from meshrl.train.checkpoint_files import (
    read_controller,
    require_space,
    state_folder,
    states,
    step_folders,
    write_json,
)

if TYPE_CHECKING:
    from meshrl.cluster.groups import TrainGroup

BEST_FILE = "best.json"
_OTHER_FILES_BYTES = 64 << 20  # a model's config, tokenizer and headers


@dataclass(frozen=True, slots=True)
class Best:
    """The highest held-out score of a run, the number of finished steps at that evaluation, and the model: its folder,
    or for step 0 the value of model.path. term: the loop.eval_term of the score; None = not recorded."""

    step: int
    score: float
    model: str
    term: str | None = None


def model_folder(run: Path, step: int) -> Path:
    return state_folder(run / "checkpoints", step).with_name("model")


async def export_to(trainer: TrainGroup, path: Path, tokenizer_from: str, chat_template: str | None = None) -> None:
    """Write the trainer's model; a folder of this name is always complete. chat_template: replaces the tokenizer's.

    Raises: CheckpointError when the disk is full.
    """
    with output_errors(path, CONTINUE_LATER):
        path.parent.mkdir(parents=True, exist_ok=True)
    needed = await trainer.model_bytes() + _OTHER_FILES_BYTES
    if trainer.executor.specs[0].model.lora.enabled:
        needed += await trainer.state_bytes()  # the adapters alone are a third of that
    require_space(path.parent, needed, "a model")
    with output_errors(path, CONTINUE_LATER), replacing(path) as aside:
        await trainer.export(str(aside), tokenizer_from)
        write_template(aside, chat_template)
        shutil.rmtree(path, ignore_errors=True)


def write_template(model: Path, text: str | None) -> None:
    """Replace the chat template in a written model's folder; None = keep the tokenizer's template."""
    if text is not None:  # Transformers prefers this file to a template in tokenizer_config.json
        (model / "chat_template.jinja").write_text(text, encoding="utf-8", newline="")


def replace_best(run: Path, best: Best, is_retained: Callable[[int], bool]) -> None:
    """Record the best model in checkpoints/best.json, and remove the former best models, unless a checkpoint records
    them as its best. is_retained: whether the model of a step is retained in any case.

    best.json always refers to a complete model: it is replaced after the new model is written and before an old one is
    removed. It is a file and not a link, so that it survives copies, archives and file systems without links.
    """
    beaten = best_facts(run)
    steps = {*beaten.get("beaten", ()), beaten["step"]} if beaten is not None else set()
    needed = steps & _best_of_states(run)
    model = best.model
    if best.step:  # relative, so that the run's folder may move
        model = os.path.relpath(model, _best_file(run).parent)
    facts = {"step": best.step, "score": best.score, "term": best.term, "model": model, "beaten": sorted(needed)}
    _write_best(run, facts)
    for step in steps - needed - {0, best.step}:
        if not is_retained(step):
            _remove_model(run, step)


def prune_models(run: Path, keep: int | None) -> None:
    """Remove the models of a run, except the newest `keep` and those that best.json or a checkpoint records as the
    best. None = keep all."""
    steps = [step for step, folder in step_folders(run / "checkpoints") if (folder / "model").is_dir()]
    old = {*steps[:-keep]} if keep is not None else set()
    if old:
        best = best_facts(run)
        for step in old - _best_of_states(run) - ({best["step"]} if best is not None else set()):
            _remove_model(run, step)


def _remove_model(run: Path, step: int) -> None:
    folder = model_folder(run, step)
    with contextlib.suppress(OSError):  # the folder that remains when this is interrupted is not taken for a model
        shutil.rmtree(folder.rename(folder.with_name("model.aside")))
        folder.parent.rmdir()  # unless it contains a state


def _best_of_states(run: Path) -> set[int]:
    """The steps whose models the checkpoints record as the best ones."""
    found = set()
    for _, folder in states(run / "checkpoints"):
        with contextlib.suppress(CheckpointError):  # damaged: no run continues from there
            best = read_controller(folder).get("best")
            if best is not None:
                found.add(best["step"])
    return found


def restore_best(run: Path, step: int, best: dict[str, Any] | None) -> str | None:
    """If the run found its best model later than step `step`, restore `best`, which was the best at that step. Returns
    the text of the replaced best.json, None if it stays. Other former best models are removed when the best model
    changes again."""
    now = best_facts(run)
    if now is None or now["step"] <= step:
        return None
    replaced = _best_file(run).read_text(encoding="utf-8")
    if best is None:
        _best_file(run).unlink()
    else:
        _write_best(run, best)
    return replaced


def read_best(run: Path) -> Best | None:
    """The best model recorded in checkpoints/best.json; None before the first evaluation."""
    facts = best_facts(run)
    if facts is None:
        return None
    model = str(_best_file(run).parent / facts["model"]) if facts["step"] else facts["model"]
    return Best(facts["step"], facts["score"], model, facts.get("term"))


def best_facts(run: Path) -> dict[str, Any] | None:
    """The contents of best.json: step, score, term, model, beaten (steps of former best models that a state needs)."""
    path = _best_file(run)
    if not path.exists():
        return None
    try:
        facts = read_json(path)
        return facts | {"step": int(facts["step"]), "score": float(facts["score"]), "model": str(facts["model"])}
    except (Unreadable, KeyError, TypeError, ValueError, OverflowError) as cause:
        raise CheckpointError(
            f"{path} is damaged: {cause}. Remove it; the run then takes its next evaluation as the best so far"
        ) from cause


def _write_best(run: Path, facts: dict[str, Any]) -> None:
    with output_errors(_best_file(run), CONTINUE_LATER):
        _best_file(run).parent.mkdir(exist_ok=True)
        with replacing(_best_file(run)) as aside:
            write_json(aside, facts)  # flushed to disk, because a resume needs it


def _best_file(run: Path) -> Path:
    return run / "checkpoints" / BEST_FILE
