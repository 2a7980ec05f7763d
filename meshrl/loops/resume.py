"""How a run is saved and goes on: what the controller adds to the tensors, and which checkpoint a run begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.run import RunSection
from meshrl.core.errors import CheckpointError, MeshrlError
from meshrl.loops.export import best_facts, cut_back_best, export_model, given_template
from meshrl.loops.job import Job
from meshrl.monitor.rollout_log import remove_steps
from meshrl.train.checkpoint_files import MANIFEST, read_controller, read_manifest, remove_leftovers, states


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run begins with. saved: what its controller knew."""

    step: int
    folder: Path
    saved: dict[str, Any]


def choose_start(run: RunSection, folder: Path, kind: str, num_steps: int) -> Start | None:
    """The checkpoint that run.resume means for the run in `folder`; None for a run that starts anew. Changes nothing.

    kind: "train" or "sft".

    Raises: MeshrlError when the folder holds a run that would be overwritten; CheckpointError when the checkpoint is
    damaged, of another command, or beyond num_steps.
    """
    own = states(folder / "checkpoints")
    if run.resume == "never" and own:
        raise MeshrlError(
            f"{folder} holds checkpoints up to step {own[-1][0]}; run.resume=auto continues from there. For a new run "
            "choose another run.name, or remove that folder"
        )
    if run.resume == "auto":
        chosen = own[-1][1] if own else None
    else:
        chosen = None if run.resume == "never" else state_in(Path(run.resume))
    is_own = chosen is not None and chosen.parent.parent.resolve() == (folder / "checkpoints").resolve()
    can_take_over = chosen is None and (run.resume == "auto" or _ended_before_its_first_step(folder))
    if (folder / "metrics.jsonl").exists() and not is_own and not can_take_over:
        raise _occupied(folder)
    start = None if chosen is None else _read(chosen, kind, num_steps)
    if start is not None and is_own and own[-1][0] > start.step:
        raise MeshrlError(
            f"{folder} has a newer checkpoint, after step {own[-1][0]}, which a run from step {start.step} on would "
            "overwrite. Choose another run.name, or continue the newest with run.resume=auto"
        )
    return start


def claim(folder: Path, resume: str) -> None:
    """Make the folder, or take over that of a run which ended before its first step, for a run that starts anew.

    Raises: MeshrlError when another run has it: of several starts at once, one gets the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if resume == "auto":
            (folder / _RESULT).unlink(missing_ok=True)
        elif _ended_before_its_first_step(folder):
            (folder / _RESULT).unlink()  # fails in all but one of several processes
        else:
            (folder / "metrics.jsonl").touch(exist_ok=False)
    except (FileNotFoundError, FileExistsError):
        raise _occupied(folder) from None


_RESULT = "result.json"  # written when a run ends, so that a folder without it may be that of a run which goes on


def _ended_before_its_first_step(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return (folder / _RESULT).is_file() and metrics.is_file() and metrics.stat().st_size == 0


def _occupied(folder: Path) -> MeshrlError:
    return MeshrlError(f"{folder} already holds a run; choose another run.name, or remove that folder")


def state_in(given: Path) -> Path:
    """The state's folder: itself, or inside a folder such as checkpoints/step_000100."""
    return given if (given / MANIFEST).is_file() else given / "state"


def _read(folder: Path, kind: str, num_steps: int) -> Start:
    saved = read_controller(folder)
    if saved.get("kind") != kind:
        raise CheckpointError(f"{folder} is a checkpoint of `meshrl {saved.get('kind')}`, not of `meshrl {kind}`")
    step = read_manifest(folder).step
    if step > num_steps:
        raise CheckpointError(
            f"{folder} is after step {step}, but this run is to end at step {num_steps}; ask for more"
        )
    return Start(step, folder, saved)


def newest_start(folder: Path, kind: str, num_steps: int) -> Start | None:
    """The newest checkpoint that the run in `folder` has itself. Raises: CheckpointError when it is damaged."""
    own = states(folder / "checkpoints")
    return _read(own[-1][1], kind, num_steps) if own else None


def cut_back(folder: Path, start: Start | None) -> None:
    """Remove what a run wrote after the checkpoint it goes on from, and will write again: unfinished saves, rollouts,
    what it took for its best model, and without a checkpoint its metrics (else their sink drops its own). Models stay:
    each is whole, and none is counted."""
    step = start.step if start is not None else 0
    if (folder / "checkpoints").is_dir():
        remove_leftovers(folder / "checkpoints")
        cut_back_best(folder, step, start.saved.get("best") if start is not None else None)
    if (folder / "rollouts").is_dir():
        remove_steps(folder / "rollouts", step)
    if step == 0:
        (folder / "metrics.jsonl").unlink(missing_ok=True)


async def save_if_due(job: Job) -> None:
    """Write the model and begin a checkpoint, after the last step and every loop.save_every_steps. Raises: what went
    wrong with the checkpoint before."""
    job.checkpoints.check()
    every = job.cfg.loop.save_every_steps
    if job.step == 0 or not (job.is_over or (every and job.step % every == 0)):
        return
    with job.spans("export"):
        await export_model(job)
    await save_now(job)


async def save_now(job: Job) -> None:
    """Begin a checkpoint of the last finished step, if there is one and it is not saved yet."""
    if job.step > 0:
        with job.stop.saving(), job.spans("save"):
            await job.checkpoints.save(job.step, snapshot(job))


def snapshot(job: Job) -> dict[str, Any]:
    """What a resumed run needs to know besides tensors, as of the last finished step. Plain JSON, and a copy: it is
    written when the tensors are, while the run goes on."""
    return {
        "kind": "train",
        "num_updates": job.num_updates,
        "version": job.trainer.version,
        "data": job.cursor,
        "rewards": list(job.rewards),
        "evals": list(job.evals),
        "proof_threshold": job.proof.threshold,
        "exported_step": job.exported_step,
        "best": best_facts(job.folder),
        "config": job.cfg.model_dump(mode="json"),
        "chat_template": given_template(job),
    }


async def restore(job: Job, start: Start) -> None:
    """Put a new job, and its trainer, where `snapshot` was taken.

    Raises: CheckpointError or DataError when files, model, data or seed are not those of the checkpoint.
    """
    saved = start.saved
    assert job.task.train_prompts is not None, "training needs data.path"
    job.task.train_prompts.load_state(saved["data"])
    await job.trainer.load(str(start.folder), saved["version"])
    job.step, job.num_updates, job.cursor = start.step, saved["num_updates"], saved["data"]
    job.rewards, job.evals = list(saved["rewards"]), [(step, score) for step, score in saved["evals"]]
    job.proof.threshold = saved["proof_threshold"]
    own = start.folder.is_relative_to(job.folder)
    job.exported_step = saved["exported_step"] if own else 0
    note_resumed(job.note, start, job.cfg.model_dump(mode="json"))


def note_resumed(note: Callable[[str], None], start: Start, config: dict[str, Any]) -> None:
    """A line for each thing that is not as it was."""
    note(f"continues from {start.folder}, after step {start.step}")
    was, now = dict(_leaves(start.saved["config"])), dict(_leaves(config))
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key) and not key.startswith("run."):
            note(f"  changed since then: {key} was {was.get(key)!r}, is {now.get(key)!r}")


def _leaves(config: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in config.items():
        found += _leaves(value, f"{path}{name}.") if isinstance(value, dict) else [(path + name, value)]
    return found
