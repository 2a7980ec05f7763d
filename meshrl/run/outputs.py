"""A running run: its folder, and all that it writes there except checkpoints and models; and when ranks and controller
write what they have recorded into RUN/traces/."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import Executor
from meshrl.cluster.launch import plan_of
from meshrl.config.explain import to_yaml
from meshrl.config.load import Loaded
from meshrl.core.errors import MeshrlError, RankFailure
from meshrl.core.files import CONTINUE_LATER, output_errors, write_text
from meshrl.core.terminal import print_message
from meshrl.core.types import Metric
from meshrl.monitor.digests import DigestLog
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.health import HealthSink
from meshrl.monitor.jsonl import to_line
from meshrl.monitor.notes import REWARDS_BYTES, REWARDS_FILE, NotesFile
from meshrl.monitor.recorder import (
    FOLDER,
    ClockReading,
    ControllerTrace,
    Phase,
    RankFacts,
    Spans,
    Step,
    write_controller,
)
from meshrl.monitor.sinks import JsonlSink, Sink, TerminalSink, read_metrics, report
from meshrl.monitor.status import STOP_FILE, StatusFile
from meshrl.monitor.trackers import open_trackers
from meshrl.plan.run_plan import RunPlan
from meshrl.run.folder import OTHER_FOLDER, FolderLease, Start, choose_start, run_name, set_aside, with_date
from meshrl.run.inputs import NO_OBJECTS, Objects, StepCallback, WriteReport
from meshrl.run.memory_check import plan_memory
from meshrl.run.signals import Stop


class RunOutputs:
    """What a loop gets for its outputs (loops/job.py: LoopOutputs), and what the start and the end of the run write.

    Before `continue_from`, a resumed run changes no file in its folder, because it may still be refused. result: more
    entries for result.json.
    """

    def __init__(
        self, loaded: Loaded[Any], kind: str, num_steps: int, folder: Path, start: Start | None, objects: Objects
    ):
        self.folder, self._loaded, self._kind, self._objects = folder, loaded, kind, objects
        self._began, self._earlier_s = time.monotonic(), 0.0  # run time of the parts that it continues
        first_step = start.step if start else 0
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
        self._health = HealthSink(self.note, lambda: self._evaluation, self.status.show_health)
        self._sinks: list[Sink] = [terminal, self.status, *([] if is_eval else [self._health])]
        self._is_open = False  # then metrics.jsonl is the first sink

        def entered(phase: str) -> None:
            self.status.entered(phase)
            terminal.entered(phase)

        self.spans = Spans(entered=entered)
        cfg = loaded.config
        facts = {
            "kind": kind,
            "schedule": cfg.loop.kind if kind == "train" else kind,
            **cfg.cluster.model_dump(include={"executor", "num_train_ranks", "num_rollout_ranks"}),
            **cfg.train.model_dump(include={"sharding_strategy", "max_tokens_per_microbatch"}),
            "dtype": cfg.model.dtype,
            "torch": version("torch"),
        }
        self.tracing = Tracing(folder, num_steps, cfg.monitor.trace_steps, self.spans, self.writes, facts)
        self.ends_early = False
        self.result: dict[str, Any] = {}
        self._evaluation: Mapping[str, str] = {}  # identity of the evaluation that is reported
        self._waiting: list[Metric] = []
        self._error: Exception | None = None  # of a sink
        self._start: dict[str, Any] = {}  # the line of this start in digests.jsonl
        self._digests: DigestLog | None = None  # before `continue_from`

    @property
    def seconds(self) -> float:
        """Since the run's start."""
        return time.monotonic() - self._began

    @property
    def wall_s(self) -> float:
        """Of all parts of the run, without the time between them."""
        return round(self._earlier_s + self.seconds, 2)

    def note(self, text: str) -> None:
        """Print a line for the user, and write it to run_notes.txt."""
        self._terminal.note(text)
        self.record(text)

    def record(self, text: str) -> None:
        """Write a line to run_notes.txt that asks for no action of the user."""
        self._notes.write(text)

    def progress(self, text: str) -> None:
        """Show how far the current phase is."""
        self._terminal.progress(text)

    def add(self, metric: Metric) -> None:
        """The next report has this metric."""
        self._waiting.append(metric)

    def report(
        self, step: int, metrics: Sequence[Metric], evaluation: Mapping[str, str] | None = None
    ) -> dict[str, float]:
        """Every sink gets the values. An error of a sink ends the run when the step is counted, so that it is saved."""
        waiting, self._waiting, self._evaluation = self._waiting, [], evaluation or {}
        values, error = report(self._sinks, step, [*metrics, *waiting])
        self._error = self._error or error
        if evaluation is None:
            sync = {n.partition("/")[2]: v for n, v in values.items() if n.split("/")[0] == "sync"}
            self.tracing.step_ended(step, sync)
        return values

    def report_end(self, step: int, metrics: Sequence[Metric], evaluation: Mapping[str, str]) -> dict[str, float]:
        """The metrics of `meshrl eval`, of which the other sinks count the answers."""
        self._evaluation = evaluation
        values, error = report(self._sinks[:1], step, metrics)
        if error is not None:
            raise error
        return values

    def show_answers(self, num_answers: int, values: Mapping[str, float]) -> None:
        """Show how many answers of `meshrl eval` are scored; only `report_end` writes metrics."""
        for sink in self._sinks[1:]:
            sink.write(num_answers, values, {})

    def record_start(self, record: dict[str, Any]) -> None:
        """Write what the results of this start depend on, for `meshrl replay`; of a run that continues when it does."""
        self._start = record
        if self._digests is not None:
            self._digests.write(1, record)

    def record_step(self, step: int, record: dict[str, Any]) -> None:
        """Write what the digests of this step are, for `meshrl replay`."""
        if self._digests is not None:
            self._digests.write(step, record)

    def raise_error(self) -> None:
        """Raises: the error of a sink, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def continue_from(self, start: Start | None) -> None:
        """Move the output of later steps aside, and write from this state on; None: from the beginning. Called again
        when the run returns to an earlier state."""
        self.writes.wait()  # files of later steps are moved
        if self._is_open:
            self._sinks.pop(0).close(failed=True)
        first_step = start.step if start is not None else 0
        cfg = self._loaded.config
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
        metrics = JsonlSink(self.folder / "metrics.jsonl", first_repeated, evaluation=lambda: self._evaluation)
        self._sinks.insert(0, metrics)
        self._health.restart(read_metrics(self.folder / "metrics.jsonl")[0])
        self._digests = DigestLog(self.folder, first_step + 1, self.writes)
        if self._start:
            self._digests.write(first_step + 1, self._start)
        self.status.go_back_to(first_step)
        self.ends_early = False  # on_step is called again for the steps that are repeated
        self.spans.take()  # drops the times of steps that are repeated
        if not self._is_open:
            self._is_open = True
            with output_errors(self.folder, OTHER_FOLDER):
                for name in ("result.json", STOP_FILE):  # of the earlier part of this run
                    (self.folder / name).unlink(missing_ok=True)
                write_text(self.folder / "config.yaml", to_yaml(self._loaded))
            resolved = cfg.model_dump(mode="json")
            of_run = self.note, self.writes, first_repeated
            self._sinks += open_trackers(cfg.monitor, self.folder, resolved, *of_run)
            if self._objects.on_step is not None:
                self._sinks.append(StepCallback(self._objects.on_step, self.end_early))

    def end_early(self) -> None:
        self.ends_early = True

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

    def close_metrics(self) -> None:
        """At the end of a run without an error; an error here is one of the run."""
        if self._is_open:
            self._sinks.pop(0).close()

    def close(self, status: str, error: str | None, write_report: WriteReport) -> None:
        """Close the sinks, write result.json and the report, which reads it, and list the outputs that are not
        complete. status: done (then the metrics are closed), interrupted or failed. A refused run changes no file."""
        for sink in self._sinks:
            sink.close(failed=status != "done")
        if not self._is_open:
            return self.status.restore_file()
        self.writes.wait()
        result = {"status": status, "error": error, "wall_s": self.wall_s, **self.result}
        self._write_result(result)
        with self.writes.attempt("report.html", MeshrlError):
            write_report(self.folder)
        if "report.html" in self.writes.counts:
            self._write_result(result)
        if (incomplete := self.writes.summary()) is not None:
            self.note(incomplete)
            if self.writes.is_failing("terminal") and not self._objects.quiet:
                print_message(incomplete)  # stderr may still be open

    def _write_result(self, result: dict[str, Any]) -> None:
        counts = self.writes.counts
        full_result = {**result, "failed_writes": counts} if counts else result
        strict = json.loads(to_line(full_result))  # NaN and infinity become texts, as JSON has no numbers for them
        indent = None if self._kind == "eval" else 2  # the results of several evaluations together are JSON lines
        with self.writes.attempt("result.json"):
            write_text(self.folder / "result.json", json.dumps(strict, indent=indent) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRun:
    """A run in its folder. kind: "train", "sft" or "eval". start: the checkpoint from which it continues, None for a
    new run."""

    loaded: Loaded[Any]
    run_plan: RunPlan
    kind: str
    num_steps: int
    folder: Path
    start: Start | None
    stop: Stop
    objects: Objects
    out: RunOutputs

    @property
    def save_key(self) -> str:
        return f"{'sft' if self.kind == 'sft' else 'loop'}.save_every_steps"

    @property
    def save_every_steps(self) -> int | None:
        cfg = self.loaded.config
        every: int | None = (cfg.sft if self.kind == "sft" else cfg.loop).save_every_steps
        return every


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
    status, error and wall_s, those of the run's result and, if writes to an output have failed, failed_writes with
    their number by output; and then the report. A refused run changes no file.

    kind: "train", "sft" or "eval", whose steps are answers.
    """
    root, notes = Path(loaded.config.run.folder), list[str]()  # notes: until the run's terminal is open
    with output_errors(root, OTHER_FOLDER):
        folder = root / run_name(loaded)
        folder.mkdir(parents=True, exist_ok=True)
        lease = FolderLease(folder)
        has_locks = lease.take()
    try:
        with output_errors(folder, OTHER_FOLDER):
            start = choose_start(loaded.config.run, folder, kind, num_steps, notes.append)
        loaded = with_date(loaded, {} if start is None else start.saved.get("config", {}))
        run_plan = plan_of(loaded.config)
        loaded = run_plan.with_reasons(loaded)
        if kind != "eval":
            run_plan = replace(run_plan, memory=plan_memory(loaded.config, notes.append))
        stop.is_in(folder)
        out = RunOutputs(loaded, kind, num_steps, folder, start, objects)
        for note in notes:
            out.note(note)
        status, error = "done", None
        try:
            if start is None:
                out.continue_from(None)
            if not has_locks:
                out.note(f"the file system of {folder} has no locks: a second run in this folder is not refused")
            yield LiveRun(
                loaded=loaded,
                run_plan=run_plan,
                kind=kind,
                num_steps=num_steps,
                folder=folder,
                start=start,
                stop=stop,
                objects=objects,
                out=out,
            )
            out.close_metrics()
        except BaseException as e:
            status = "interrupted" if isinstance(e, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"
            error = f"{type(e).__name__}: {e}" if status == "failed" else None
            if isinstance(e, RankFailure) and (path := out.keep_stacks(e)) is not None:
                e.add_note(f"the stacks of all ranks at the failure: {path}")
            raise
        finally:
            out.close(status, error, write_report)
    finally:
        lease.release()


T = TypeVar("T")
_BEFORE = 2  # steps before the profiler starts: the first ones are slower, and the last of them shows its slow-down
_EARLY = 3  # without the profiler, traces/ is written after this number of steps, and at the end of the run


class Tracing:
    """The trace of one run. It never ends the run: failed writes are counted, and lost ranks are left out."""

    def __init__(
        self, folder: Path, num_steps: int, trace_steps: int, spans: Spans, writes: FailedWrites, facts: dict[str, Any]
    ):
        self._folder, self._spans, self._writes, self._facts = folder / FOLDER, spans, writes, facts
        self._num_steps, self._trace_steps = num_steps, trace_steps
        self._steps: deque[Step] = deque(maxlen=64)
        self._first: int | None = None  # finished steps when this process started or continued the run
        self._since_ns = 0
        self._profiling = self._is_complete = False
        self._clocks: dict[int, list[ClockReading]] = {}

    def step_ended(self, step: int, sync: Mapping[str, float]) -> None:
        """sync: the metrics sync/* of this step, without the prefix."""
        now = time.time_ns()
        while self._steps and self._steps[-1].step >= step:  # the run has returned to an earlier step
            self._steps.pop()
        self._steps.append(Step(step, self._since_ns, now, self._profiling, sync))
        self._since_ns = now

    async def between_steps(self, executor: Executor, step: int, is_over: bool) -> None:
        """Start the profiler or write the trace, if it is time. step: finished steps."""
        if self._first is None:
            self._first, self._since_ns = step, time.time_ns()
        done, count = step - self._first, self._trace_steps
        begin = min(_BEFORE, max(0, self._num_steps - self._first - count))
        is_time = self._profiling and done >= begin + count if count else done == _EARLY
        if (is_over or is_time) and not self._is_complete:
            with self._spans("trace"):
                await self._write(executor)
            self._profiling, self._is_complete = False, count > 0
        elif count and done >= begin and not (self._profiling or self._is_complete):
            with self._spans("trace"):
                await self._read_clocks(executor)
                await _everywhere(executor, lambda rank: executor.call(rank, RankWorker.start_profiler))
            self._profiling = True

    async def _write(self, executor: Executor) -> None:
        with self._writes.attempt(FOLDER):
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.glob("rank_*"):  # of an earlier part of the run, with other ranks
                path.unlink()
        answers = await _everywhere(executor, lambda rank: executor.call(rank, RankWorker.write_trace, self._folder))
        await self._read_clocks(executor)
        ranks = {}
        for rank, (host, device, error) in answers.items():
            spec, clock = executor.specs[rank], self._clocks.get(rank, [])
            ranks[rank] = RankFacts(host=host, device=device, trains=spec.trains, samples=spec.samples, clock=clock)
            with self._writes.attempt(FOLDER):
                if error:
                    raise OSError(error)
        phases = [Phase(*interval) for interval in self._spans.intervals]
        with self._writes.attempt(FOLDER):
            trace = ControllerTrace(phases=phases, steps=[*self._steps], ranks=ranks, facts=self._facts)
            write_controller(self._folder, trace)

    async def _read_clocks(self, executor: Executor) -> None:
        """Add the offset of each rank's clock, measured over the command channel."""

        async def exchange(rank: int) -> ClockReading:
            before = time.time_ns()
            theirs = await executor.call(rank, RankWorker.clock)
            after = time.time_ns()
            middle = (before + after) // 2
            return ClockReading(middle, theirs - middle, (after - before + 1) // 2)

        best: dict[int, ClockReading] = {}
        for _ in range(16):  # of clocks; the one with the shortest round trip counts
            for rank, reading in (await _everywhere(executor, exchange)).items():
                if rank not in best or reading.error_ns < best[rank].error_ns:
                    best[rank] = reading
        for rank, reading in best.items():
            self._clocks.setdefault(rank, []).append(reading)


async def _everywhere(executor: Executor, call: Callable[[int], Awaitable[T]]) -> dict[int, T]:
    """The answers of all ranks, except those that are lost: the next command reports their failure."""
    ranks = [spec.rank for spec in executor.specs]
    outcomes = await asyncio.gather(*map(call, ranks), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, MeshrlError):
            raise outcome
    return {
        rank: outcome for rank, outcome in zip(ranks, outcomes, strict=True) if not isinstance(outcome, BaseException)
    }
