"""A run's folder: made with its config in it, written to while the run goes on, and finished however the run ends."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.explain import to_yaml
from meshrl.config.load import Loaded
from meshrl.core.errors import RankFailure
from meshrl.core.types import Metric
from meshrl.loops.resume import Start, choose_start, claim, cut_back, newest_start
from meshrl.loops.status import StatusFile, put_back, status_as_it_is
from meshrl.monitor.jsonl import to_line
from meshrl.monitor.report.page import write_report
from meshrl.monitor.sinks import JsonlSink, Sink, TerminalSink, report
from meshrl.monitor.spans import Spans
from meshrl.monitor.trackers import open_trackers


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run writes to. start: the checkpoint it is to go on from, None for a new run. summary: what result.json is
    to hold besides how the run ended; asked once, at the end.

    A run that goes on has touched nothing of what is there until `go_on_from`: it may yet be refused.
    """

    loaded: Loaded[Any]
    kind: str
    num_steps: int
    folder: Path
    note: Callable[[str], None]
    began: float
    start: Start | None
    status: StatusFile
    spans: Spans
    sinks: list[Sink]
    is_open: bool = False
    summary: Callable[[], dict[str, Any]] = dict

    @property
    def seconds(self) -> float:
        """Since the run's start."""
        return time.monotonic() - self.began

    def newest_start(self) -> Start | None:
        """The run's own newest checkpoint, else the one it began with. Raises: CheckpointError when it is damaged."""
        return newest_start(self.folder, self.kind, self.num_steps) or self.start

    def report(self, step: int, metrics: Sequence[Metric]) -> dict[str, float]:
        return report(self.sinks, step, metrics)

    def go_on_from(self, start: Start | None) -> None:
        """Cut back what stands for later steps, and write from there on; None: from the beginning. Called again when
        the run goes back to a checkpoint. Raises: ConfigError when a sink can't be opened."""
        if self.is_open:
            self.sinks.pop(0).close(failed=True)
        first_step = start.step if start is not None else 0
        if self.is_open or self.loaded.config.run.resume != "never":
            cut_back(self.folder, start)
        self.sinks.insert(0, JsonlSink(self.folder / "metrics.jsonl", first_step))
        self.status.go_back_to(first_step)
        self.spans.take()  # of steps that come again
        if not self.is_open:
            self.is_open = True
            (self.folder / "config.yaml").write_text(to_yaml(self.loaded), encoding="utf-8")
            cfg = self.loaded.config
            self.sinks += open_trackers(cfg.monitor, self.folder, cfg.model_dump(mode="json"), self.note)

    def keep_stacks(self, failure: RankFailure) -> Path | None:
        """Where every rank stood when one failed, as a file; None where nobody could say."""
        if not failure.stacks:
            return None
        path = self.folder / "stacks.txt"
        path.write_text(f"{failure}\n\n{failure.stacks}\n", encoding="utf-8")
        return path

    def finish(self, status: str, error: str | None) -> None:
        """result.json and report.html."""
        result = {"status": status, "error": error, "wall_s": round(self.seconds, 2), **self.summary()}
        strict = json.loads(to_line(result))  # with texts for what JSON has no number for
        (self.folder / "result.json").write_text(json.dumps(strict, indent=2) + "\n", encoding="utf-8")
        write_report(self.folder)


@contextmanager
def recorded(loaded: Loaded[Any], kind: str, num_steps: int, quiet: bool = False) -> Iterator[Record]:
    """The folder of a run, as run.resume wants it, with open sinks; a run that goes on calls `go_on_from` itself, when
    nothing can refuse it any more. At the end, also of one that fails or is interrupted: result.json with the keys
    status, error and wall_s and the run's own summary, and report.html. A refused run leaves what it found.

    kind: "train" or "sft". quiet: nothing is printed. Raises: MeshrlError and CheckpointError, as choose_start and
    claim; ConfigError when a sink can't be opened.
    """
    cfg, began = loaded.config, time.monotonic()
    folder = Path(cfg.run.folder) / run_name(loaded)
    start = choose_start(cfg.run, folder, kind, num_steps)
    if start is None:
        claim(folder, cfg.run.resume)
    folder.mkdir(parents=True, exist_ok=True)
    first_step = start.step if start else 0
    silent = open(os.devnull, "w", encoding="utf-8") if quiet else None  # noqa: SIM115, closed with the sinks
    terminal = TerminalSink(num_steps, silent, first_step=first_step)
    status_before = status_as_it_is(folder)
    status_file = StatusFile(folder, num_steps, first_step)

    def entered(phase: str) -> None:
        status_file.entered(phase)
        terminal.entered(phase)

    record = Record(
        loaded=loaded,
        kind=kind,
        num_steps=num_steps,
        folder=folder,
        note=terminal.note,
        began=began,
        start=start,
        status=status_file,
        spans=Spans(entered=entered),
        sinks=[terminal, status_file],
    )
    status, error = "done", None
    try:
        if start is None:
            record.go_on_from(None)
        yield record
    except BaseException as e:
        status = "interrupted" if isinstance(e, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"
        error = f"{type(e).__name__}: {e}" if status == "failed" else None
        if isinstance(e, RankFailure) and (path := record.keep_stacks(e)) is not None:
            e.add_note(f"where every rank stood: {path}")
        raise
    finally:
        for sink in record.sinks:
            sink.close(failed=status != "done")
        if silent is not None:
            silent.close()
        if record.is_open:
            record.finish(status, error)
        else:
            put_back(folder, status_before)


def run_name(loaded: Loaded[Any]) -> str:
    """run.name. `auto` is the config's name and the time, with a number where a run began in that second; the folder
    is made at once, so that no other run can take the name."""
    run = loaded.config.run
    if run.name != "auto":
        return run.name
    begun = name = f"{loaded.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        try:
            (Path(run.folder) / name).mkdir(parents=True)
            return name
        except FileExistsError:
            number += 1
            name = f"{begun}-{number}"
