"""A running run: its folder with all output files, its checkpoints, and its end."""

from __future__ import annotations

import asyncio
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshrl.cluster.groups import TrainGroup
from meshrl.config.explain import to_yaml
from meshrl.config.load import Loaded
from meshrl.core.errors import DataError, MeshrlError, RankFailure
from meshrl.core.files import CONTINUE_LATER, output_errors, replacing, write_text
from meshrl.core.terminal import print_message
from meshrl.core.types import Metric
from meshrl.data.chat import ChatFiles, read_tokenizer, write_chat
from meshrl.loops.job import Resumable
from meshrl.model.lora import ADAPTER_FOLDER, LEAST_MERGED
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.jsonl import to_line
from meshrl.monitor.notes import REWARDS_BYTES, REWARDS_FILE, NotesFile
from meshrl.monitor.recorder import Spans
from meshrl.monitor.sinks import JsonlSink, Sink, TerminalSink, report
from meshrl.monitor.status import STOP_FILE, StatusFile
from meshrl.monitor.trackers import open_trackers
from meshrl.plan.decisions import AUTO_SAVE_S
from meshrl.run.checkpoints import Checkpoints
from meshrl.run.folder import (
    Best,
    Start,
    best_facts,
    choose_start,
    model_folder,
    prune_models,
    read_best,
    replace_best,
    run_name,
    set_aside,
    with_date,
)
from meshrl.run.inputs import NO_OBJECTS, Objects, StepCallback
from meshrl.run.lease import FolderLease
from meshrl.run.signals import Stop
from meshrl.run.tracing import Tracing
from meshrl.train.checkpoint_files import require_space, state_folder

WriteReport = Callable[[Path], object]
"""Called with the run's folder after all other files are written."""
_OTHER_FOLDER = "Choose another run.folder or run.name, make room, or make the folder writable"


class LiveRun:
    """The services for a loop (loops/job.py: RunServices), and the start and end of the run.

    start: the checkpoint from which the run continues, None for a new run; before `continue_from`, a resumed run
    changes no file in its folder, because it may still be refused. summary: more entries for result.json; called once,
    at the end. chat: of the models that are written. evaluation: identity of the run's evaluations, {} before it is
    known. save_every_steps: the value of save_key.
    """

    checkpoints: Checkpoints  # while the loop runs

    def __init__(
        self,
        loaded: Loaded[Any],
        kind: str,
        num_steps: int,
        folder: Path,
        start: Start | None,
        stop: Stop,
        objects: Objects,
    ):
        self.loaded, self.kind, self.num_steps, self.folder = loaded, kind, num_steps, folder
        self.start, self.stop, self.objects, self.began = start, stop, objects, time.monotonic()
        stop.is_of_command = (folder / STOP_FILE).is_file
        first_step = start.step if start else 0
        self._earlier_s = 0.0  # run time of the parts that it continues
        if start is not None and start.is_of(folder):
            self._earlier_s = float(start.saved.get("wall_s", 0.0))
        self.writes = FailedWrites()
        self.status = StatusFile(folder, num_steps, first_step, self.writes)
        is_eval = kind == "eval"  # then stdout has only the results
        stream = io.StringIO() if objects.quiet else sys.stderr if is_eval else None
        counted = "answer" if is_eval else "step"
        terminal = TerminalSink(num_steps, stream, finished_steps=first_step, writes=self.writes, counted=counted)
        self._terminal, self._notes = terminal, NotesFile(folder, self.writes)
        self.reward_log = NotesFile(folder, self.writes, name=REWARDS_FILE, max_bytes=REWARDS_BYTES)
        for notice in loaded.notices:  # printed before the folder was known
            self._notes.write(f"note: {notice}")
        self.sinks: list[Sink] = [terminal, self.status]

        def entered(phase: str) -> None:
            self.status.entered(phase)
            terminal.entered(phase)

        self.spans = Spans(entered=entered)
        cfg, is_sft = loaded.config, kind == "sft"
        facts = {
            "kind": kind,
            "schedule": cfg.loop.kind if kind == "train" else kind,
            **cfg.cluster.model_dump(include={"executor", "num_train_ranks", "num_rollout_ranks"}),
            **cfg.train.model_dump(include={"sharding_strategy", "max_tokens_per_microbatch"}),
            "dtype": cfg.model.dtype,
            "torch": version("torch"),
        }
        self.tracing = Tracing(folder, num_steps, cfg.monitor.trace_steps, self.spans, self.writes, facts)
        self._sync_metrics: dict[str, float] = {}
        self.is_open = self.ends_early = False
        self.sink_error: Exception | None = None  # raised when the step is counted
        self.restarts = 0
        self.chat = ChatFiles()
        self.evaluation: dict[str, str] = {}
        self.summary: Callable[[], dict[str, Any]] = dict
        self.save_key = "sft.save_every_steps" if is_sft else "loop.save_every_steps"
        self.save_every_steps: int | None = (cfg.sft if is_sft else cfg.loop).save_every_steps

    @property
    def seconds(self) -> float:
        """Since the run's start."""
        return time.monotonic() - self.began

    @property
    def _wall_s(self) -> float:
        """Of all parts of the run, without the time between them."""
        return round(self._earlier_s + self.seconds, 2)

    def note(self, text: str) -> None:
        """Print a line for the user, and write it to run_notes.txt."""
        self._terminal.note(text)
        self._notes.write(text)

    def report(self, step: int, metrics: Sequence[Metric]) -> dict[str, float]:
        """Every sink gets the values. An error of a sink ends the run when the step is counted, so that it is saved."""
        values, error = report(self.sinks, step, [*metrics, *self.checkpoints.take_metrics()])
        self.sink_error = self.sink_error or error
        self._sync_metrics = {n.partition("/")[2]: v for n, v in values.items() if n.split("/")[0] == "sync"}
        self.note_recovered()
        return values

    def note_recovered(self) -> None:
        """A line for each output that is written again after failed writes."""
        for line in self.writes.recovered():
            self.note(line)

    def progress(self, text: str) -> None:
        """Show how far the current phase is."""
        self._terminal.progress(text)

    def show_progress(self, num_answers: int, values: Mapping[str, float]) -> None:
        """Show how many answers of an evaluation are scored; only `report` writes metrics."""
        for sink in self.sinks[1:]:
            sink.write(num_answers, values, {})

    @contextmanager
    def updating(self, job: Resumable) -> Iterator[None]:
        with self.stop.updating(job):
            yield
        self.tracing.step_ended(job.step, self._sync_metrics)
        self._raise_sink_error()

    def _raise_sink_error(self) -> None:
        error, self.sink_error = self.sink_error, None
        if error is not None:
            raise error

    def end_early(self) -> None:
        self.ends_early = True

    async def save_if_due(self, job: Resumable, every: int | None, with_model: bool, eval_every: int = 0) -> None:
        self._raise_sink_error()
        self.checkpoints.check()
        await self.tracing.between_steps(self.checkpoints.trainer.executor, job.step, job.is_over)
        steps = eval_every if every is None else every
        is_due = job.is_over or bool(steps and job.step % steps == 0)
        if every is None and not job.is_over:
            is_old = self.checkpoints.age_s > AUTO_SAVE_S
            is_due = (is_due or is_old) and not self.checkpoints.is_writing
        if job.step == 0 or not is_due or not self.objects.saves:
            return
        if with_model and (job.is_over or every is not None):
            with self.spans("export"):
                await self.export_model(job.step)
        await self.save(job)

    async def save(self, job: Resumable) -> None:
        """Start to save a checkpoint of the last finished step, unless it is saved."""
        self.writes.wait()  # a run that continues from here does not write earlier files again
        saved = {
            "kind": self.kind,
            "best": best_facts(self.folder),
            "config": self.loaded.config.model_dump(mode="json"),
            "chat_template": self.chat.template,
            "stop_token_ids": self.chat.stop_token_ids,
            "wall_s": self._wall_s,
        }
        with self.stop.saving(), self.spans("save"):
            await self.checkpoints.save(job.step, saved | job.snapshot(), continues=not job.is_over)

    async def export_model(self, step: int) -> Path:
        """Write the trainer's model, once for each step, in the compute dtype and with its tokenizer; a folder of this
        name is always complete. Raises: CheckpointError when the disk is full."""
        path, cfg, trainer = model_folder(self.folder, step), self.loaded.config, self.checkpoints.trainer
        if path.is_dir():
            return path
        with output_errors(path, CONTINUE_LATER):
            path.parent.mkdir(parents=True, exist_ok=True)
        needed = await trainer.model_bytes() + (256 << 10)  # of the header
        if cfg.model.lora.enabled:
            needed += await trainer.state_bytes()  # the adapters alone are a third of that
        require_space(path.parent, needed, "a model")
        with output_errors(path, CONTINUE_LATER), replacing(path) as aside:
            share = await trainer.export(str(aside), cfg.model.path)
            write_chat(aside, self.chat)
        self.note(f"wrote {path}")
        if share is not None and share < LEAST_MERGED:
            self.note(
                f"its {cfg.model.dtype} weights have {share:.0%} of the change by the LoRA adapters; the rest is below "
                f"half a step of that dtype. {path / ADAPTER_FOLDER} has the adapters for peft, and this writes all of "
                f"it: meshrl convert {state_folder(path.parent.parent, step).parent} FOLDER --dtype float32"
            )
        prune_models(self.folder, cfg.run.keep_models)
        return path

    async def try_export(self, trainer: TrainGroup) -> None:
        """Write all files of a model except its weights to a temporary folder, and load its tokenizer, so that nothing
        refuses the model after the steps that made it. Raises: ConfigError; DataError; OutputError."""
        if not self.objects.saves:
            return
        with output_errors(self.folder, _OTHER_FOLDER), TemporaryDirectory(dir=self.folder) as name:
            await trainer.export(name, path := self.loaded.config.model.path, weights=False)
            write_chat(Path(name), self.chat)
            if read_tokenizer(name).get_vocab() != read_tokenizer(path).get_vocab():
                raise DataError(
                    f"a tokenizer with the files that an export copies has other tokens than that of {path}"
                )

    async def keep_best(self, step: int, score: float) -> None:
        """Make the model of `step` the best one if its score is higher, or if that of the former best one is of
        evaluations with another identity; for step 0 that is the model of model.path."""
        with self.spans("export"):
            own, now = self.evaluation, read_best(self.folder)
            best = read_best(self.folder, own)
            if math.isnan(score) or (best is not None and best == now and score <= best.score):
                return
            if best is not None and score <= best.score:  # of evaluations like those before the last change
                step, score, model = best.step, best.score, best.model
            else:
                model = str(await self.export_model(step)) if step else self.loaded.config.model.path
            await self.checkpoints.settle()  # the checkpoint that is being written may refer to the former best model
            every = self.save_every_steps or self.num_steps
            replace_best(
                self.folder, Best(step, score, model, own), lambda old: old == self.num_steps or old % every == 0
            )

    def continue_from(self, start: Start | None) -> None:
        """Move the output of later steps aside, and write from this state on; None: from the beginning. Called again
        when the run returns to an earlier state. Raises: ConfigError when a sink can't be opened."""
        self.writes.wait()  # files of later steps are moved
        if self.is_open:
            self.sinks.pop(0).close(failed=True)
        first_step = start.step if start is not None else 0
        cfg = self.loaded.config
        with output_errors(self.folder, CONTINUE_LATER):
            aside = set_aside(self.folder, start)
        self._notes.open()
        self.reward_log.open()
        if start is None and cfg.run.resume == "auto":
            moved = f"; what was there is now in {aside}" if aside else ""
            self.note(f"run.resume=auto: {self.folder} has no checkpoint, so the run starts at step 0{moved}")
        elif aside is not None:
            overwritten = "an earlier part of the run" if start is not None else "an earlier run in this folder"
            self.note(f"what {overwritten} wrote after step {first_step} is now in {aside}")
        first_repeated = start.first_repeated_step if start is not None else 0
        self._metrics = JsonlSink(self.folder / "metrics.jsonl", first_repeated, evaluation=lambda: self.evaluation)
        self.sinks.insert(0, self._metrics)
        self.status.go_back_to(first_step)
        self.ends_early = False  # on_step is called again for the steps that are repeated
        self.spans.take()  # drops the times of steps that are repeated
        if not self.is_open:
            self.is_open = True
            with output_errors(self.folder, _OTHER_FOLDER):
                for name in ("result.json", STOP_FILE):  # of the earlier part of this run
                    (self.folder / name).unlink(missing_ok=True)
                write_text(self.folder / "config.yaml", to_yaml(self.loaded))
            resolved = cfg.model_dump(mode="json")
            of_run = self.note, self.writes, lambda: self._metrics.curve_of(self.evaluation), first_repeated
            self.sinks += open_trackers(cfg.monitor, self.folder, resolved, *of_run)
            if self.objects.on_step is not None:
                self.sinks.append(StepCallback(self.objects.on_step, self.end_early))

    def keep_stacks(self, failure: RankFailure) -> Path | None:
        """Write the stacks of all ranks at a failure to a file; None if there is no file: no rank could report its
        stacks, or they can't be written."""
        if not failure.stacks:
            return None
        path = self.folder / "stacks.txt"
        with self.writes.attempt("stacks.txt"):
            path.write_text(f"{failure}\n\n{failure.stacks}\n", encoding="utf-8")
            return path
        return None

    def write_result(self, status: str, error: str | None, write_report: WriteReport) -> None:
        """Write result.json and the report, which reads it, and list the outputs that are not complete."""
        self.writes.wait()
        result = {"status": status, "error": error, "wall_s": self._wall_s, **self.summary()}
        self._write_result(result)
        with self.writes.attempt("report.html", MeshrlError):
            write_report(self.folder)
        if "report.html" in self.writes.counts:
            self._write_result(result)
        self.note_recovered()
        if (incomplete := self.writes.summary()) is not None:
            self.note(incomplete)
            if self.writes.is_failing("terminal") and not self.objects.quiet:
                print_message(incomplete)  # stderr may still be open

    def _write_result(self, result: dict[str, Any]) -> None:
        counts = self.writes.counts
        full_result = {**result, "failed_writes": counts} if counts else result
        strict = json.loads(to_line(full_result))  # NaN and infinity become texts, as JSON has no numbers for them
        indent = None if self.kind == "eval" else 2  # the results of several evaluations together are JSON lines
        with self.writes.attempt("result.json"):
            write_text(self.folder / "result.json", json.dumps(strict, indent=indent) + "\n")


@contextmanager
def live_run(
    loaded: Loaded[Any],
    kind: str,
    num_steps: int,
    stop: Stop,
    write_report: WriteReport,
    objects: Objects = NO_OBJECTS,
) -> Iterator[LiveRun]:
    """A run with its folder and open sinks. For a resumed run, the caller calls `continue_from` when no check can
    refuse it any more. When the block ends, also by a failure or an interrupt, result.json is written, with the keys
    status, error and wall_s, those of the run's summary and, if writes to an output have failed, failed_writes with
    their number by output; and then the report. A refused run changes no file.

    kind: "train", "sft" or "eval", whose steps are answers. Raises: MeshrlError when another process has the folder's
    lease; MeshrlError and CheckpointError, as choose_start; ConfigError when a sink can't be opened; OutputError when
    the folder or the metrics can't be written.
    """
    root, notes = Path(loaded.config.run.folder), list[str]()  # notes: until the run's terminal is open
    with output_errors(root, _OTHER_FOLDER):
        folder = root / run_name(loaded)
        folder.mkdir(parents=True, exist_ok=True)
        lease = FolderLease(folder)
        has_locks = lease.take()
    try:
        with output_errors(folder, _OTHER_FOLDER):
            start = choose_start(loaded.config.run, folder, kind, num_steps, notes.append)
        loaded = with_date(loaded, {} if start is None else start.saved.get("config", {}))
        run = LiveRun(loaded, kind, num_steps, folder, start, stop, objects)
        for note in notes:
            run.note(note)
        status, error = "done", None
        try:
            if start is None:
                run.continue_from(None)
            if not has_locks:
                run.note(f"the file system of {folder} has no locks: a second run in this folder is not refused")
            yield run
            if run.is_open:
                run.sinks.pop(0).close()  # the metrics: an error here is one of the run
        except BaseException as e:
            status = "interrupted" if isinstance(e, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"
            error = f"{type(e).__name__}: {e}" if status == "failed" else None
            if isinstance(e, RankFailure) and (path := run.keep_stacks(e)) is not None:
                e.add_note(f"the stacks of all ranks at the failure: {path}")
            raise
        finally:
            for sink in run.sinks:
                sink.close(failed=status != "done")
            if run.is_open:
                run.write_result(status, error, write_report)
            else:
                run.status.restore_file()
    finally:
        lease.release()
