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
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Metric
from meshrl.monitor.jsonl import to_line
from meshrl.monitor.report.page import write_report
from meshrl.monitor.sinks import JsonlSink, Sink, TerminalSink, report
from meshrl.monitor.trackers import open_trackers


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run writes to. summary: what result.json is to hold besides how the run ended; asked once, at the end."""

    folder: Path
    sinks: list[Sink]
    note: Callable[[str], None]
    began: float
    summary: Callable[[], dict[str, Any]] = dict

    @property
    def seconds(self) -> float:
        """Since the run's start."""
        return time.monotonic() - self.began

    def report(self, step: int, metrics: Sequence[Metric]) -> dict[str, float]:
        return report(self.sinks, step, metrics)


@contextmanager
def recorded(loaded: Loaded[Any], num_steps: int) -> Iterator[Record]:
    """The folder and open sinks of a new run. At the end, also of one that fails or is interrupted: result.json with
    the keys status, error and wall_s and the run's own summary, and report.html.

    Raises: MeshrlError when a run of that name is there; ConfigError when a sink can't be opened.
    """
    cfg, began = loaded.config, time.monotonic()
    folder = _new_folder(loaded, cfg.run.folder, cfg.run.name)
    terminal = TerminalSink(num_steps)
    sinks: list[Sink] = [JsonlSink(folder / "metrics.jsonl"), terminal]
    record = Record(folder=folder, sinks=sinks, note=terminal.note, began=began)
    status, error = "done", None
    try:
        sinks += open_trackers(cfg.monitor, folder, cfg.model_dump(mode="json"), record.note)
        yield record
    except BaseException as e:
        status = "interrupted" if isinstance(e, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"
        error = f"{type(e).__name__}: {e}" if status == "failed" else None
        raise
    finally:
        for sink in sinks:
            sink.close(failed=status != "done")
        result = {"status": status, "error": error, "wall_s": round(record.seconds, 2), **record.summary()}
        strict = json.loads(to_line(result))  # with texts for what JSON has no number for
        (folder / "result.json").write_text(json.dumps(strict, indent=2) + "\n", encoding="utf-8")
        write_report(folder)


def _new_folder(loaded: Loaded[Any], parent: str, name: str) -> Path:
    if name == "auto":
        name = f"{loaded.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(parent) / name
    if (folder / "metrics.jsonl").exists():
        raise MeshrlError(f"{folder} already holds a run; choose another run.name, or remove that folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    return folder
