"""`meshrl replay`: trains on the recorded answers of a run's steps again, by the same code and without samplers, and
compares the digests and metrics of each step with the recorded ones."""

from __future__ import annotations

import asyncio
import sys
from bdb import BdbQuit
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshrl.cluster.inline import InlineExecutor
from meshrl.cluster.launch import check_devices, launched
from meshrl.cluster.rows import PlannedRows
from meshrl.cluster.train_group import TrainGroup
from meshrl.cluster.worker import prepare_ranks
from meshrl.config.load import is_sft
from meshrl.config.run import RunConfig
from meshrl.core.device import device_type, named_devices, threads_of
from meshrl.core.errors import ConfigError, DataError, MeshrlError, SamplerMismatchError
from meshrl.core.files import is_there
from meshrl.core.terminal import counted
from meshrl.core.types import POLICY, Metric, Trajectory
from meshrl.loops.step_record import first_difference
from meshrl.loops.sync_and_probe import FLOOR_NATS, SamplerProof
from meshrl.loops.train_step import StepWork, train_on
from meshrl.model.costs import run_memory
from meshrl.model.lora import trained_weights
from meshrl.monitor.digests import DIGESTS_FILE, Record, read_digests
from meshrl.monitor.metrics import divide, merge, units
from meshrl.monitor.recorder import Spans
from meshrl.monitor.rollout_log import answer_files, read_rollouts
from meshrl.monitor.sinks import read_metrics
from meshrl.parallel.fsdp import local_shard
from meshrl.plan.memory import verdict
from meshrl.process.diagnosis import memory_limit
from meshrl.run.folder import is_leased, similar_runs
from meshrl.run.keeper import Checkpoints
from meshrl.run.provenance import changes_since, model_digest, recorded_modules, with_recorded_modules
from meshrl.run.signals import run_in_own_loop
from meshrl.train.checkpoint import SavedTensors
from meshrl.train.checkpoint_files import MANIFEST, states
from meshrl.train.state import GRADIENT

Note = Callable[[str], None]
BeforeStep = Callable[[TrainGroup, PlannedRows], Awaitable[list[Metric]]]
_OF_NORM = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}  # of a gradient, by another order of sums, at most
_NEAR_ZERO = 1e-2  # with another layout, a metric with a smaller value may differ as much as one with this value


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """What differs first. text: in words, with step, update and phase."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Steps in succession that one start of the run, or several with an equal layout, have made. num_threads: of each
    rank; None = on an accelerator, or without an optimizer step."""

    config: RunConfig
    start: Record
    steps: list[int]
    num_threads: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    """What a replay reads. state: the step and the folder of the state that it begins with; folder None = the weights
    of model.path."""

    run: Path
    parts: list[_Part]
    state: tuple[int, Path | None]
    records: dict[int, Record]
    answers: dict[int, Path]
    metrics: dict[int, dict[str, float]]

    @property
    def steps(self) -> list[int]:
        return [step for part in self.parts for step in part.steps]


def replay(
    run: Path,
    step: int,
    note: Note,
    inline: bool = False,
    stops: bool = False,
    into: Path | None = None,
) -> FirstDifference | None:
    """Repeat the steps up to `step` from the nearest state before it, or from the beginning of the run. Returns the
    first difference; None = all digests and metrics are equal. into: a folder that then gets the state after `step`.

    inline: in this process, with any layout; gradients and metrics are then compared within the rounding of another
    order of sums. stops: at a breakpoint before each optimizer step of `step`.

    Raises: ConfigError when the folder does not have what a replay needs. Nothing is written into it.
    """
    recorded = _read(run, step)
    first, last = recorded.steps[0], recorded.steps[-1]
    seconds = sum(recorded.metrics[each].get("time/train_s", 0.0) for each in recorded.steps)
    begins = f"the state after step {recorded.state[0]}" if recorded.state[1] else "the beginning of the run"
    num = counted(last - first + 1, "step")
    note(f"replaying {num} of {run}, {first} to {last}, from {begins}; they took {seconds:.1f} s of training")
    for part in recorded.parts:
        for change in changes_since(part.start):
            note(f"step {part.steps[0]}: {change}")
    with TemporaryDirectory() as name:
        for module, source in (each for part in recorded.parts for each in recorded_modules(part.start).values()):
            Path(name, f"{module}.py").write_text(source, encoding="utf-8")
        sys.path.append(name)
        try:
            prepare_ranks(recorded.parts[0].config.cluster)
            if inline:
                work = _inline(recorded, note, stops, Path(name))
            else:
                work = _replay(recorded, note, into or Path(name), saves_last=into is not None)
            difference = run_in_own_loop(work, "the replay")
        except BdbQuit as cause:
            raise ConfigError("the debugger has ended the replay") from cause
        finally:
            sys.path.remove(name)
    if difference is not None:
        note(f"step {difference.step} differs: {difference.text}")
    else:
        equal = "within rounding" if inline else "to the bit"
        note(f"{num}: equal {equal}")
    return difference


def _read(run: Path, step: int) -> _Recorded:
    if not is_there(run / "config.yaml"):
        raise ConfigError(f"{run} is not the folder of a run{similar_runs(run)}")
    if is_sft(run / "config.yaml"):
        raise ConfigError(f"{run} is a run of meshrl sft: its folder does not have the rows of its steps")
    if is_leased(run):
        raise ConfigError(f"{run} is running; replay it when it has ended, or has been ended by `meshrl stop {run}`")
    if not is_there(run / DIGESTS_FILE):
        raise ConfigError(f"{run} has no {DIGESTS_FILE}: an earlier version of meshrl wrote it, or no step has ended")
    try:
        starts, records = read_digests(run)
        if step not in records:
            raise ConfigError(f"{run} has no step {step}; its steps are 1 to {max(records, default=0)}")
        first = min(starts, default=1)
        begins: list[tuple[int, Path | None]] = [*states(run / "checkpoints")]
        if first == 1:
            begins.append((0, None))
        elif is_there(other := Path(str(starts[first].get("from"))) / MANIFEST):  # of the run that it continues
            begins.append((first - 1, other.parent))
        state = max((begin for begin in begins if begin[0] < step), default=None, key=itemgetter(0))
        if state is None:
            raise ConfigError(
                f"{run} continues {starts[first].get('from')}, which is gone, and has no state before step {step}"
                + (f"; it can replay steps after {min(at for at, _ in begins)}" if begins else "")
            )
        steps = list(range(state[0] + 1, step + 1))
        answers = answer_files(run, "step")
        missing = [each for each in steps if each not in answers or each not in records]
        if missing:
            after = sorted({at + 1 for at, _ in begins if at + 1 in answers})
            raise ConfigError(
                f"{run} has no answers of step {missing[0]}, which the replay needs "
                f"(monitor.rollout_log_every_steps). Steps that it can replay: {after or 'none'}"
            )
        lines = read_metrics(run / "metrics.jsonl")[0]
    except DataError as damage:
        raise ConfigError(str(damage)) from damage
    metrics = {line.step: line.metrics for line in lines if "eval/mean_at_k" not in line.metrics}
    if no_metrics := [each for each in steps if each not in metrics]:
        raise ConfigError(f"{run / 'metrics.jsonl'} has no line of step {no_metrics[0]}")
    return _Recorded(
        run=run, parts=_parts(starts, records, steps), state=state, records=records, answers=answers, metrics=metrics
    )


def _parts(starts: dict[int, Record], records: dict[int, Record], steps: Sequence[int]) -> list[_Part]:
    parts = list[_Part]()
    for step in steps:
        start = starts[max(first for first in starts if first <= step)]
        updates = records[step]["updates"]
        threads = threads_of(updates[0]["computes"][0]) if updates else None
        is_equal = bool(parts) and threads in (None, parts[-1].num_threads)
        if is_equal and all(parts[-1].start.get(key) == start.get(key) for key in ("config", "modules", "model")):
            parts[-1].steps.append(step)
            continue
        try:
            config = RunConfig.model_validate(with_recorded_modules(start))
        except ValueError as cause:
            raise ConfigError(
                f"the config of step {step} is not one of this version of meshrl, but of "
                f"{start.get('versions', {}).get('meshrl')}: {' '.join(str(cause).split())}"
            ) from cause
        model = Path(config.model.path)
        is_known = is_there(model) or not model.is_absolute()  # a hub id is not
        if is_known and start.get("model") not in (None, model_digest(model)):
            raise ConfigError(f"{model} has another model than when it was used for step {step}; restore that one")
        parts.append(_Part(config=config, start=start, steps=[step], num_threads=threads))
    return parts


def _as_recorded(cfg: RunConfig) -> RunConfig:
    """On this machine, whatever the run had."""
    executor = "inline" if cfg.cluster.executor == "inline" else "processes"
    return cfg.model_copy(update={"cluster": cfg.cluster.model_copy(update={"executor": executor, "nodes": 1})})


def _in_one_process(cfg: RunConfig) -> RunConfig:
    # One that samples, so that the plan has no sampler in the train rank. It is not started.
    one = {"executor": "inline", "nodes": 1, "num_train_ranks": 1, "num_rollout_ranks": 1}
    mesh = {"mesh": type(cfg.train.mesh)(), "tensor_model_parallel_size": None}
    return cfg.model_copy(
        update={
            "cluster": cfg.cluster.model_copy(update=one),
            "train": cfg.train.model_copy(update=mesh),
        }
    )


async def _inline(recorded: _Recorded, note: Note, stops: bool, folder: Path) -> FirstDifference | None:
    """Repeat the last step in one process, from the state and with the gradients of a replay on the recorded layout,
    which has been equal to the bit; without such a replay all steps, and no gradients are compared."""
    last = recorded.parts[-1]
    device, size = ("cpu", memory_limit()) if device_type() == "cpu" else (None, named_devices()[0][1])
    note(f"one process {verdict(run_memory(_in_one_process(last.config), device, size)[1][0], size)}")
    gradients = _Gradients(folder, note, stops, _OF_NORM[last.config.model.dtype])
    try:
        clusters = [_as_recorded(part.config).cluster for part in recorded.parts]
        reasons = [check_devices(cluster, None, cluster.num_train_ranks, 0) for cluster in clusters]
        if (reason := next(filter(None, reasons), None)) is None:
            difference = await _replay(recorded, note, folder, before_step=gradients.save)
            reason = None if difference is None else f"step {difference.step} differs: {difference.text}"
    except MeshrlError as error:
        reason = str(error).splitlines()[0]
    if reason is not None:
        note(f"gradients are not compared, because on the recorded layout {reason}")
        gradients.states.clear()
    elif gradients.states:
        last = replace(last, steps=last.steps[-1:])
        recorded = replace(recorded, parts=[last], state=(last.steps[0] - 1, gradients.states[0]))
    (own := folder / "inline").mkdir()
    return await _replay(recorded, note, own, inline=True, before_step=gradients.compare)


@dataclass(slots=True)
class _Gradients:
    """Of the last step, before clipping. states: before its optimizer steps, with the gradients: `save` writes, and
    `compare` reads them. limit: of the norm of a difference over the norm of the gradient."""

    folder: Path
    note: Note
    stops: bool
    limit: float
    states: list[Path] = field(default_factory=list)

    async def save(self, trainer: TrainGroup, rows: PlannedRows) -> list[Metric]:
        (folder := self.folder / f"update_{len(self.states)}").mkdir()
        self.states.append(await _saved(folder, trainer, 1, {}))
        return []

    async def compare(self, trainer: TrainGroup, rows: PlannedRows) -> list[Metric]:
        """With a breakpoint, if `stops`. Raises: FloatingPointError when a gradient differs by more than the limit."""
        assert isinstance(trainer.executor, InlineExecutor)
        engine, samples = trainer.executor.worker.engines[POLICY.name], rows.samples  # noqa: F841
        gradients = {name: p.grad for name, p in trained_weights(engine.model.lm).items() if p.grad is not None}
        of_norm = dict[str, float]()
        if self.states:
            saved = SavedTensors(self.states.pop(0), POLICY.name)
            for name, gradient in gradients.items():
                saved.load({GRADIENT + name: (was := gradient.clone())})
                of_norm[name] = float(local_shard(gradient - was).norm()) / (float(local_shard(was).norm()) or 1.0)
        if self.stops:
            breakpoint()
        if of_norm:
            worst, most = max(of_norm.items(), key=itemgetter(1))
            text = f"the gradient of {worst} differs most, by {most:.1e} of its norm"
            if most > self.limit:
                raise FloatingPointError(f"{text}; rounding changes at most {self.limit:.0e}")
            self.note(text)
        return []


async def _replay(
    recorded: _Recorded,
    note: Note,
    folder: Path,
    saves_last: bool = False,
    inline: bool = False,
    before_step: BeforeStep | None = None,
) -> FirstDifference | None:
    """folder: gets the state between two parts, and with saves_last the last one. before_step: for the last step."""
    state = recorded.state[1]
    for part in recorded.parts:
        cfg = (_in_one_process if inline else _as_recorded)(part.config)
        threads = None if inline else part.num_threads
        async with launched(cfg, cfg.cluster.num_train_ranks, 0, samples=False, num_threads=threads) as groups:
            assert groups.trainer is not None
            trainer = groups.trainer
            await trainer.load(state, 0)
            for step in part.steps:
                hook = before_step if step == recorded.steps[-1] else None
                difference = await _repeat(recorded, part, step, trainer, inline, hook)
                if difference is not None:
                    return difference
                note(f"step {step}: equal")
            if saves_last or part is not recorded.parts[-1]:  # the next part has another layout
                saved = {key: part.start.get(key) for key in ("config", "chat_template", "stop_token_ids")}
                state = await _saved(folder, trainer, part.steps[-1], {"kind": "train", **saved})
    return None


async def _saved(folder: Path, trainer: TrainGroup, step: int, controller: dict[str, Any]) -> Path:
    async with Checkpoints(folder, trainer, 1, lambda text: None) as checkpoints:
        await checkpoints.save(step, controller, continues=False)
    return states(checkpoints.folder)[-1][1]


async def _repeat(
    recorded: _Recorded,
    part: _Part,
    step: int,
    trainer: TrainGroup,
    inline: bool,
    before_step: BeforeStep | None,
) -> FirstDifference | None:
    """Train on the answers of one step, and compare."""
    record, cfg = recorded.records[step], part.config
    answers = await asyncio.to_thread(_answers, recorded.answers[step])
    trained, replaced = answers[: record["trained"]], answers[record["trained"] :]
    work = StepWork(
        cfg=cfg,
        trainer=trainer,
        proof=SamplerProof(threshold=record["threshold"]),
        step=step - 1,
        spans=Spans(),
        note=lambda text: None,  # the run has printed it
        before_step=None if before_step is None else partial(before_step, trainer),
    )
    trainer.version = record["version"]
    try:
        _, metrics = await train_on(work, trained, replaced)
    except (SamplerMismatchError, FloatingPointError) as error:
        return FirstDifference(step=step, text=str(error))
    if len(work.records) != len(record["updates"]):
        counts = f"{len(record['updates'])} optimizer steps then, {len(work.records)} now"
        return FirstDifference(step=step, text=counts)
    for number, (was, now) in enumerate(zip(record["updates"], work.records)):
        phase = first_difference(was, now, work.shards[number], only_inputs=inline)
        if phase is not None:
            place = f"update {was['update'] + 1} of {cfg.train.updates_per_step}, " if len(work.records) > 1 else ""
            text = f"{place}{phase}"
            if was["computes"] != now["computes"]:
                text += f". It was computed by {', '.join(was['computes'])}; now by {', '.join(now['computes'])}"
            return FirstDifference(step=step, text=text)
    return _metric_difference(recorded.metrics[step], metrics, step, cfg.model.dtype if inline else None)


def _answers(path: Path) -> list[Trajectory]:
    answers = [logged.trajectory for logged in read_rollouts(path)]
    if any(answer.prompt.media for answer in answers):
        raise ConfigError(f"{path}: its prompts have images, of which a run's folder has only digests and thumbnails")
    return answers


def _metric_difference(
    was: dict[str, float], metrics: Sequence[Metric], step: int, dtype: str | None
) -> FirstDifference | None:
    """The first metric with another value, without times. dtype: of another layout, whose sums are rounded otherwise;
    None = all must be equal to the bit."""
    merged = merge(metrics)
    now, of = divide(merged), units(merged)
    for name, value in now.items():
        if name not in was or "s" in of.get(name, "").split("/"):
            continue
        allowed = 0.0
        if dtype is not None:
            is_rounding = name.partition("/")[0] in ("proof", "correction", "loss")  # nats, or sums that are near 0
            allowed = FLOOR_NATS[dtype] * max(abs(was[name]), 1.0 if is_rounding else _NEAR_ZERO)
        if not (abs(value - was[name]) <= allowed or value == was[name] or (value != value and was[name] != was[name])):
            return FirstDifference(step=step, text=f"{name} was {was[name]!r}, is {value!r}")
    return None
