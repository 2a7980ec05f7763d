"""A run's folder: made with its config in it, written to while the run goes on, and finished however the run ends."""

from __future__ import annotations

import asyncio
import json
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
from meshrl.loops.restart import run_name
from meshrl.loops.resume import Start, choose_start
from meshrl.loops.status import StatusFile
from meshrl.monitor.jsonl import to_line
from meshrl.monitor.report.page import write_report
from meshrl.monitor.sinks import JsonlSink, Sink, TerminalSink, report
from meshrl.monitor.spans import Spans
from meshrl.monitor.trackers import open_trackers


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run writes to. start: the checkpoint it goes on from, None for a new run. summary: what result.json is to
    hold besides how the run ended; asked once, at the end."""

    folder: Path
    sinks: list[Sink]
    note: Callable[[str], None]
    began: float
    start: Start | None
    spans: Spans
    summary: Callable[[], dict[str, Any]] = dict

    @property
    def seconds(self) -> float:
        """Since the run's start."""
        return time.monotonic() - self.began

    def report(self, step: int, metrics: Sequence[Metric]) -> dict[str, float]:
        return report(self.sinks, step, metrics)


@contextmanager
def recorded(loaded: Loaded[Any], kind: str, num_steps: int) -> Iterator[Record]:
    """The folder and open sinks of a run, as run.resume wants it. At the end, also of one that fails or is
    interrupted: result.json with the keys status, error and wall_s and the run's own summary, and report.html.

    kind: "train" or "sft". Raises: MeshrlError and CheckpointError, as choose_start; ConfigError when a sink can't be
    opened.
    """
    cfg, began = loaded.config, time.monotonic()
    folder = Path(cfg.run.folder) / run_name(loaded)
    start = choose_start(cfg.run, folder, kind, num_steps)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    first_step = start.step if start else 0
    terminal = TerminalSink(num_steps, first_step=first_step)
    status_file = StatusFile(folder, num_steps, first_step)
    sinks: list[Sink] = [JsonlSink(folder / "metrics.jsonl", first_step), terminal, status_file]
    spans = Spans(entered=status_file.entered)
    record = Record(folder=folder, sinks=sinks, note=terminal.note, began=began, start=start, spans=spans)
    status, error = "done", None
    try:
        sinks += open_trackers(cfg.monitor, folder, cfg.model_dump(mode="json"), record.note)
        yield record
    except BaseException as e:
        status = "interrupted" if isinstance(e, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"
        error = f"{type(e).__name__}: {e}" if status == "failed" else None
        if isinstance(e, RankFailure) and e.stacks:
            (folder / "stacks.txt").write_text(f"{e}\n\n{e.stacks}\n", encoding="utf-8")
            e.add_note(f"where every rank stood: {folder / 'stacks.txt'}")
        raise
    finally:
        for sink in sinks:
            sink.close(failed=status != "done")
        result = {"status": status, "error": error, "wall_s": round(record.seconds, 2), **record.summary()}
        strict = json.loads(to_line(result))  # with texts for what JSON has no number for
        (folder / "result.json").write_text(json.dumps(strict, indent=2) + "\n", encoding="utf-8")
        write_report(folder)
