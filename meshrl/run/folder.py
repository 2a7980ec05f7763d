"""The folder of a run: its name, the checkpoint that the run starts from, what is moved aside for it, its models,
and the record of the best one. No torch is imported."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from meshrl.config.load import Loaded
from meshrl.config.run import RunSection
from meshrl.config.source import Reader, content, leaves
from meshrl.core.errors import CheckpointError, ConfigError, DataError, MeshrlError
from meshrl.core.files import CONTINUE_LATER, Unreadable, is_there, output_errors, read_json, replacing, write_text
from meshrl.core.lookup import similar_names
from meshrl.monitor.notes import NOTES_FILE
from meshrl.monitor.rollout_log import step_files
from meshrl.monitor.sinks import JsonlSink, MetricsLine, metrics_lines, split_lines
from meshrl.monitor.status import STATUS_FILE
from meshrl.monitor.trace import FOLDER as TRACES
from meshrl.train.checkpoint_files import (
    MANIFEST,
    read_controller,
    read_manifest,
    remove_leftovers,
    state_folder,
    states,
    step_folders,
    write_json,
)

_METRICS, _BEST, _EARLIER = "metrics.jsonl", "best.json", "earlier_"
_RESULT = "result.json"  # written when a run ends
LOGS = "logs"  # of servers that ranks have started
OTHER_FOLDER = "Choose another run.folder or run.name, make room, or make the folder writable"
_OF_A_RUN = (
    *(_METRICS, f"checkpoints/{_BEST}", _RESULT, "report.html", "view.html", "stacks.txt"),
    *(NOTES_FILE, TRACES, LOGS, "tensorboard", "wandb"),
)


@dataclass(frozen=True, slots=True)
class Start:
    """The state that a run continues from. folder: a checkpoint's tensors; None = the beginning of the run, with the
    weights of model.path. saved: the state of its controller."""

    step: int
    folder: Path | None
    saved: dict[str, Any]

    @property
    def first_repeated_step(self) -> int:
        """The first step whose output the run writes again; the evaluation before the first step has number 0."""
        return self.step + 1 if self.folder is not None else 0

    def is_of(self, run: Path) -> bool:
        """Whether it is a checkpoint of the run in this folder, and not of another one."""
        return self.folder is not None and self.folder.parent.parent.resolve() == (run / "checkpoints").resolve()


def run_name(loaded: Loaded[Any]) -> str:
    """run.name. `auto` = the config's name and the time, with a number if another run began in the same second; the
    folder is created at once, so that no other run can take the name."""
    run = loaded.config.run
    if run.name != "auto":
        return str(run.name)
    first = name = f"{loaded.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        try:
            (Path(run.folder) / name).mkdir(parents=True)
            return name
        except FileExistsError:
            number += 1
            name = f"{first}-{number}"


def config_of(run: Path | None) -> dict[str, Any]:
    """The config.yaml of a run; {} if there is none that can be read."""
    if run is not None:
        with suppress(ConfigError):
            return dict(content(Reader(run).files(run / "config.yaml")[0]))
    return {}


def with_date(loaded: Loaded[Any], former: Mapping[str, Any]) -> Loaded[Any]:
    """The config with a value of run.date: its own, that of the run whose config is `former`, or now."""
    run = loaded.config.run
    if run.date is not None:
        return loaded
    date = former.get("run", {}).get("date") or datetime.now().isoformat(timespec="seconds")
    section = run.model_copy(update={"date": datetime.fromisoformat(date)})
    config = loaded.config.model_copy(update={"run": section})
    return replace(loaded, config=config, origins=loaded.origins | {"run.date": "start of the run"})


def choose_start(run: RunSection, folder: Path, kind: str, num_steps: int, note: Callable[[str], None]) -> Start | None:
    """The checkpoint that run.resume selects for the run in `folder`; None for a new run. Changes no file. Call it with
    the folder's lease.

    kind: "train" or "sft". note: receives a line for each damaged checkpoint that is passed over.

    Raises: MeshrlError when the folder contains a run that would be overwritten; CheckpointError when the checkpoint is
    damaged, from another command, or beyond num_steps.
    """
    if run.resume == "auto":
        return newest_start(folder, kind, num_steps, note)
    newest = max((step for step, _ in states(folder / "checkpoints")), default=0)
    start = None
    if run.resume != "never":
        state = state_in(Path(run.resume))
        start = Start(read_manifest(state).step, state, read_controller(state))
        _require_fitting(start, kind, num_steps)
    elif newest:
        raise MeshrlError(
            f"{folder} contains checkpoints up to step {newest}; run.resume=auto continues from there. For a "
            "new run, choose another run.name"
        )
    if start is not None and start.is_of(folder):
        if newest > start.step:
            raise MeshrlError(
                f"{folder} has a newer checkpoint, after step {newest}; a run that starts from step {start.step} would "
                "overwrite it. Choose another run.name, or continue from the newest with run.resume=auto"
            )
    elif (metrics := folder / _METRICS).exists() and not ((folder / _RESULT).is_file() and _is_empty(metrics)):
        raise MeshrlError(  # a run that ended before its first step occupies no name
            f"{folder} already contains a run; choose another run.name. Or set run.resume=auto, which continues it; "
            "without a checkpoint it starts again, and moves the files of that run to a folder earlier_N"
        )
    return start


def similar_runs(missing: Path) -> str:
    """For errors about a folder that is no run: the first of the runs in it, or the most similar ones next to it; "" if
    there are none."""
    if not is_there(missing.parent):
        return ""
    inside = sorted(path.parent for path in missing.glob(f"*/{STATUS_FILE}")) if is_there(missing) else []
    if inside:
        return f". It contains {len(inside)} runs, such as {inside[0]}"
    near = similar_names(missing.name, (path.parent.name for path in missing.parent.glob(f"*/{STATUS_FILE}")))
    return f"; did you mean {' or '.join(str(missing.with_name(name)) for name in near)}?" if near else ""


def state_in(folder: Path) -> Path:
    """The folder of tensors: `given` itself, or `state` inside a folder such as checkpoints/step_000100."""
    return folder if is_there(folder / MANIFEST) else folder / "state"


def _require_fitting(start: Start, kind: str, num_steps: int) -> None:
    """Raises: CheckpointError when it is a checkpoint of another command, or beyond num_steps."""
    assert start.folder is not None
    if (saved_kind := start.saved.get("kind")) != kind:
        raise CheckpointError(
            f"{start.folder} is a checkpoint of `meshrl {saved_kind}`, not of `meshrl {kind}`. To start from "
            f"its model, set model.path to {start.folder.parent / 'model'} and run.resume to never"
        )
    if start.step > num_steps:
        steps = "loop.num_steps" if kind == "train" else "sft.num_steps"
        raise CheckpointError(
            f"{start.folder} is after step {start.step}, but this run ends at step {num_steps}; raise {steps}"
        )


def newest_start(
    folder: Path, kind: str, num_steps: int, note: Callable[[str], None], before: int | None = None
) -> Start | None:
    """The newest checkpoint of the run in `folder`, of a step below `before` if that is given. A damaged one is passed
    over, with a note. Raises: CheckpointError when all are damaged, or when the newest is of another command or beyond
    num_steps."""
    first: CheckpointError | None = None
    for step, state in reversed(states(folder / "checkpoints")):
        if before is not None and step >= before:
            continue
        try:
            start = Start(step, state, read_controller(state))
        except CheckpointError as damage:
            first = first or damage
            note(f"checkpoint passed over: {damage}")
            continue
        _require_fitting(start, kind, num_steps)
        return start
    if first is not None and before is None:
        raise first
    return None


def set_aside(folder: Path, start: Start | None) -> Path | None:
    """Move what the run in `folder` wrote after `start` to a new folder earlier_N in it, because the run will write it
    again: metrics, rollouts, checkpoints and a best model of later steps; without `start` all that a run writes. Other
    files stay, and with `start` also the notes, because they state why a run returned to an earlier step. Unfinished
    saves are removed. Returns the new folder; None when there was nothing to move."""
    checkpoints, rollouts, metrics = folder / "checkpoints", folder / "rollouts", folder / _METRICS
    asides = [path for parent in (folder, checkpoints, rollouts) for path in parent.glob(_EARLIER + "*")]
    numbers = [int(number) for path in asides if (number := path.name.removeprefix(_EARLIER)).isdecimal()]
    aside = folder / f"{_EARLIER}{1 + max(numbers, default=0)}"
    step, first_repeated = (start.step, start.first_repeated_step) if start is not None else (-1, 0)
    later = split_lines(metrics, first_repeated)[1] if start is not None and metrics.exists() else ""
    remove_leftovers(checkpoints)
    moved = [path for number, path in step_folders(checkpoints) if number > step]
    moved += step_files(rollouts, first_repeated)
    if start is None:
        moved += [path for name in _OF_A_RUN if (path := folder / name).exists() and not _is_empty(path)]
    for path in moved:
        parent = path.parent  # a link may lead to another disk: then the move stays there
        to = parent / aside.name if parent.is_symlink() else aside / parent.relative_to(folder)
        to.mkdir(parents=True, exist_ok=True)
        os.rename(path, to / path.name)
    if start is not None:
        best = restore_best(folder, start.step, start.saved.get("best") if start.is_of(folder) else None)
        for path, text in ((aside / _METRICS, later), (aside / "checkpoints" / _BEST, best)):
            if text:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
        if start.folder is not None and not start.is_of(folder):
            _adopt_past(folder, start, start.folder.resolve().parents[1])
    for name in ("config.yaml", _RESULT) if moved or aside.is_dir() or start is None else ():
        if (folder / name).is_file():  # the run replaces them
            aside.mkdir(exist_ok=True)
            shutil.copy2(folder / name, aside / name)
    return aside if moved or aside.is_dir() else None


def _adopt_past(folder: Path, start: Start, theirs: Path) -> None:
    """Begin the run in `folder` with what another one had at its checkpoint `start`, if it has none: the scores of its
    evaluations, and its best model, by links to the files where the file system has them. theirs: its checkpoints."""
    ours, past, units, lines = folder / _METRICS, theirs.parent / _METRICS, dict[str, str](), list[MetricsLine]()
    if past.is_file() and (not ours.exists() or _is_empty(ours)):
        with suppress(DataError):  # what is before the damage counts
            lines.extend(metrics_lines(past, units, '"eval/mean_at_k"'))
        sink = JsonlSink(ours, evaluation=lambda: line.evaluation)
        for line in lines:
            scores = {name: value for name, value in line.metrics.items() if name.split("/")[0] == "eval"}
            if line.step <= start.step:
                sink.write(line.step, scores, {name: units.get(name, "") for name in scores})
        sink.close()
    best = start.saved.get("best")
    if best is None or best_facts(folder) is not None:
        return
    source, model = theirs / best["model"], model_folder(folder, best["step"])
    if best["step"] and source.is_dir() and not model.is_dir():
        model.parent.mkdir(parents=True, exist_ok=True)
        with replacing(model) as aside:
            shutil.copytree(source, aside, copy_function=_link)
    if not best["step"] or model.is_dir():
        _write_best(folder, best | {"beaten": [], "others": []})


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def bytes_of(folder: Path) -> int:
    """Bytes of the states, models, rollouts and metrics of a run, without those of earlier parts."""
    places = [path for _, path in step_folders(folder / "checkpoints")]
    files = [file for root in places for file in root.rglob("*")]
    files += [folder / _METRICS, *step_files(folder / "rollouts", 0)]
    total = 0
    for file in files:
        with suppress(OSError):  # a link without a target, or a file that another program has removed
            total += file.lstat().st_size
    return total


def _is_empty(path: Path) -> bool:
    return path.stat().st_size == 0 if path.is_file() else path.is_dir() and not any(path.iterdir())


def changed_keys(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each key of the config that differs from a checkpoint's config, except run.*."""
    before, after = ({key: value for key, value in leaves(config).items() if value != {}} for config in (was, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not key.startswith("run."):
            yield f"changed since the checkpoint: {key} was {before.get(key)!r}, is {after.get(key)!r}"


# ---- models and the best one


@dataclass(frozen=True, slots=True)
class Best:
    """The highest held-out score of a run, the number of finished steps at that evaluation, and the model: its folder,
    or for step 0 the value of model.path. evaluation: the identity of the evaluation; {} = unknown."""

    step: int
    score: float
    model: str
    evaluation: dict[str, str] = field(default_factory=dict)


def model_folder(run: Path, step: int) -> Path:
    return state_folder(run / "checkpoints", step).with_name("model")


def newest_model(run: Path) -> str | None:
    """The folder of the newest model that the run has written; None if it has none."""
    models = [folder / "model" for _, folder in step_folders(run / "checkpoints")]
    return next((str(model) for model in reversed(models) if model.is_dir()), None)


def replace_best(run: Path, best: Best, is_retained: Callable[[int], bool]) -> None:
    """Record the best model in checkpoints/best.json, and remove the former best models, unless a checkpoint records
    them as its best. is_retained: whether the model of a step is retained in any case.

    best.json always refers to a complete model: it is replaced after the new model is written and before an old one is
    removed. It is a file and not a link, so that it survives copies, archives and file systems without links.
    """
    former = best_facts(run) or {}
    others = former.pop("others", [])
    if former and former.get("evaluation", {}) != best.evaluation:
        others.append(_facts(former))
    beaten = {*former.get("beaten", ()), former["step"]} if former else set()
    beaten |= {other["step"] for other in others if other["evaluation"] == best.evaluation} - {best.step}
    others = [other for other in others if other["evaluation"] != best.evaluation]
    model = best.model
    if best.step:  # relative, so that the run's folder may move
        model = os.path.relpath(model, _best_file(run).parent)
    best_model = {"step": best.step, "score": best.score, "evaluation": best.evaluation, "model": model}
    _write_best(run, {**best_model, "beaten": sorted(beaten & _best_of_states(run)), "others": others})
    _remove_models(run, [step for step in beaten if not is_retained(step)])


def prune_models(run: Path, keep: int | None) -> None:
    """Remove the models of a run, except the newest `keep` and those that best.json or a checkpoint records as the
    best. None = keep all."""
    steps = [step for step, folder in step_folders(run / "checkpoints") if (folder / "model").is_dir()]
    if keep is not None:
        _remove_models(run, steps[:-keep])


def _remove_models(run: Path, steps: list[int]) -> None:
    """Remove the models of these steps, except those that best.json or a checkpoint records as the best."""
    if not steps:
        return
    best = best_facts(run)
    retained = {one["step"] for one in (best, *best["others"])} if best is not None else set()
    for step in {*steps} - _best_of_states(run) - retained:
        folder = model_folder(run, step)
        with suppress(OSError):  # the folder that remains when this is interrupted is not taken for a model
            shutil.rmtree(folder.rename(folder.with_name("model.aside")))
            folder.parent.rmdir()  # unless it contains a state


def _best_of_states(run: Path) -> set[int]:
    """The steps whose models the checkpoints record as the best ones."""
    steps = set()
    for _, folder in states(run / "checkpoints"):
        with suppress(CheckpointError):  # damaged: no run continues from there
            best = read_controller(folder).get("best")
            if best is not None:
                steps.add(best["step"])
    return steps


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


def read_best(run: Path, evaluation: dict[str, str] | None = None) -> Best | None:
    """The best model recorded in checkpoints/best.json; None before the first evaluation. evaluation: the best model of
    evaluations with this identity, if they have one that is still there."""
    saved = best_facts(run)
    if saved is not None and evaluation is not None and saved.get("evaluation", {}) != evaluation:
        saved = next((one for one in saved["others"] if one["evaluation"] == evaluation), None)
        if saved is not None and saved["step"] and not (_best_file(run).parent / saved["model"]).is_dir():
            return None
    if saved is None:
        return None
    model = str(_best_file(run).parent / saved["model"]) if saved["step"] else saved["model"]
    return Best(saved["step"], saved["score"], model, saved.get("evaluation", {}))


def best_facts(run: Path) -> dict[str, Any] | None:
    """Contents of best.json: step, score, evaluation, model, beaten (steps of former best ones that states need),
    others (the best ones of evaluations with other identities: step, score, evaluation, model)."""
    path = _best_file(run)
    if not path.exists():
        return None
    try:
        saved = read_json(path)
        return saved | _facts(saved) | {"others": [_facts(other) for other in saved.get("others", ())]}
    except (Unreadable, KeyError, TypeError, ValueError, OverflowError) as cause:
        raise CheckpointError(
            f"{path} is damaged: {cause}. Remove it; the run then takes its next evaluation as the best so far"
        ) from cause


def _facts(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Those of one best model. Raises: KeyError, TypeError, ValueError, OverflowError."""
    facts = {"step": int(saved["step"]), "score": float(saved["score"]), "model": str(saved["model"])}
    return facts | {"evaluation": dict(saved.get("evaluation", {}))}


def _write_best(run: Path, content: dict[str, Any]) -> None:
    with output_errors(_best_file(run), CONTINUE_LATER):
        _best_file(run).parent.mkdir(exist_ok=True)
        with replacing(_best_file(run)) as aside:
            write_json(aside, content)  # flushed to disk, because a resume needs it


def _best_file(run: Path) -> Path:
    return run / "checkpoints" / _BEST
