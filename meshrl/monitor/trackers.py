"""TensorBoard and Weights & Biases as sinks; each is imported only when a run uses it."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshrl.config.monitor import MonitorConfig
from meshrl.core.errors import ConfigError
from meshrl.core.files import write_text
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.sinks import Sink


def open_trackers(
    cfg: MonitorConfig,
    folder: Path,
    resolved: dict[str, Any],
    note: Callable[[str], None],
    writes: FailedWrites,
    first_step: int = 0,
) -> list[Sink]:
    """The configured sinks in addition to metrics.jsonl and the terminal.

    folder: the run's folder; its name is the run's name in W&B. resolved: the complete config as plain values, for W&B.
    note: called with a line that contains the address of the curves. writes: counts failed writes of the trackers.
    first_step: the first one that a resumed run repeats.
    """
    opened: list[Sink] = []
    for name in dict.fromkeys(cfg.sinks):
        if name == "tensorboard":
            opened.append(_Tracker(TensorBoardSink(folder / "tensorboard", first_step), name, writes))
            note(f"TensorBoard: tensorboard --logdir {folder / 'tensorboard'}")
        else:
            wandb = WandbSink(folder, cfg.wandb_project, resolved)
            opened.append(_Tracker(wandb, name, writes))
            note(f"W&B: {wandb.destination}")
    return opened


class _Tracker:
    """A tracker of which a failed write is counted and does not end the run."""

    def __init__(self, sink: Sink, name: str, writes: FailedWrites):
        self._sink, self._name, self._writes = sink, name, writes

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        with self._writes.attempt(self._name):
            self._sink.write(step, values, units)

    def close(self, failed: bool = False) -> None:
        with self._writes.attempt(self._name):
            self._sink.close(failed)


class TensorBoardSink:
    """Event files in `folder`; the description of each curve is the glossary's text. Flushed after every step. Readers
    stop at a truncated record, so a failed write ends the file, and the next write begins another one. When steps are
    repeated, TensorBoard's reader in Python drops those that were written before."""

    def __init__(self, folder: Path, first_step: int):
        from tensorboard.summary import Writer

        self._folder, self._make = folder, Writer
        self._output: Any = None
        self._writer: Any = None
        self._last = math.inf  # the step written last; at first it may be any step of an earlier process
        self._first_step = first_step  # 0 after the first write

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        if self._writer is None:
            self._output = _event_files(self._folder)
            self._writer = self._make(self._output)
        try:
            if step < self._last:
                self._output.start_at(max(step, self._first_step))
            self._last, self._first_step = step, 0
            for name, value in values.items():
                texts = [f"Unit: {unit}."] if (unit := units.get(name)) else []
                if (meaning := meaning_of(name)) is not None:
                    texts.append(f"Healthy: {meaning.entry.healthy}.")
                    texts += [f"Otherwise: {meaning.entry.otherwise}."] if meaning.entry.otherwise else []
                self._writer.add_scalar(name, value, step, description="\n\n".join(texts))
            self._writer.flush()
        except OSError:
            with suppress(OSError):
                self.close()
            raise

    def close(self, failed: bool = False) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


_numbers = itertools.count()  # of event files, which readers sort by name


def _event_files(folder: Path) -> Any:
    """TensorBoard's output to a folder, written in the caller's thread: the thread of its own EventFileWriter ends at
    the first error, and prints a traceback."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary import DirectoryOutput
    from tensorboard.summary.writer.record_writer import RecordWriter

    class Events(RecordWriter):  # type: ignore[misc]  # the package has no types
        def add_event(self, event: Any) -> None:
            self.write(event.SerializeToString())

    class Output(DirectoryOutput):  # type: ignore[misc]
        def __init__(self) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            parts = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):06d}"
            self._ev_writer = Events((folder / f"events.out.tfevents.{parts}").open("xb"))
            self._ev_writer.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

        def start_at(self, step: int) -> None:
            """Readers drop what earlier events have of this and later steps."""
            log = SessionLog(status=SessionLog.START)
            self._ev_writer.add_event(Event(wall_time=time.time(), step=step, session_log=log))

    return Output()


class WandbSink:
    """One W&B run, with its files in `folder`/wandb. WANDB_MODE=offline keeps it on this machine until `wandb sync`. A
    run that continues in this folder continues the W&B run, whose id is in the file run_id; repeated steps are logged
    again.
    """

    def __init__(self, folder: Path, project: str | None, resolved: dict[str, Any]):
        import wandb

        place = folder / "wandb" / "run_id"
        if not place.is_file():
            place.parent.mkdir(exist_ok=True)
            write_text(place, secrets.token_hex(4))
        settings = wandb.Settings(console="off", silent=True)  # its lines would break the live display
        try:
            self._run = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT", "meshrl"),
                name=folder.name,
                id=place.read_text(encoding="utf-8").strip(),
                resume="allow",  # a run of this id, if there is one
                dir=str(folder),
                config=resolved,
                settings=settings,
            )
        except wandb.errors.Error as e:
            raise ConfigError(
                f"monitor.sinks has wandb, which reports: {e}\nRun `wandb login` (or set WANDB_API_KEY), set "
                "WANDB_MODE=offline to keep the run on this machine, or remove wandb from monitor.sinks. If the W&B "
                f"run was deleted, remove {place}: another one begins"
            ) from e
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        upload = f"offline; upload it with: wandb sync {Path(self._run.dir).parent}"
        self.destination = upload if self._run.offline else self._run.url or "disabled by WANDB_MODE"

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        self._run.log({"step": step, **values})

    def close(self, failed: bool = False) -> None:
        """End the W&B run; failed: mark it as failed."""
        self._run.finish(exit_code=int(failed))
