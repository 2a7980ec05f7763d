"""Trackers and own sinks. Each client is imported only when a run uses it."""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.monitor import TRACKERS, MonitorConfig
from meshrl.config.source import leaves
from meshrl.core.errors import ConfigError
from meshrl.core.files import write_text
from meshrl.core.lookup import look_up
from meshrl.monitor.failed_writes import FailedWrites
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

    folder: the run's folder; its name is the run's name in each tracker. resolved: the complete config as plain values.
    note: called with a line that contains the address of the curves. writes: counts failed writes of the trackers.
    first_step: the first one that a resumed run repeats.

    Raises: ConfigError where a tracker can't be opened, and for an own sink that is none.
    """
    opened: list[Sink] = []
    for name in dict.fromkeys(cfg.sinks):
        if name in TRACKERS:
            opener, advice = _CLIENTS[name]
            try:
                with redirect_stdout(io.StringIO()):  # its lines would break the live display
                    client = opener(folder, cfg, resolved, first_step)
            except Exception as error:  # each client has its own
                raise ConfigError(
                    f"monitor.sinks has {name}, which reports: {error}\n{advice}, or remove {name} from monitor.sinks."
                ) from error
            opened.append(_Tracker(client, name, writes, Exception))
            note(f"{name}: {client.destination}")
        else:
            own = look_up(name, {}, "monitor.sinks")(folder, resolved)
            if not (callable(getattr(own, "write", None)) and callable(getattr(own, "close", None))):
                raise ConfigError(f"monitor.sinks: {name} returned {own!r:.80}, which lacks write or close")
            opened.append(_Tracker(own, name, writes))
    return opened


class _Tracker:
    """A sink of which a failed write (an OSError, or one of the types `also`) is counted and does not end the run."""

    def __init__(self, sink: Sink, name: str, writes: FailedWrites, *also: type[Exception]):
        self._sink, self._name, self._writes, self._also = sink, name, writes, also

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        with self._writes.attempt(self._name, *self._also):
            self._sink.write(step, values, units)

    def close(self, failed: bool = False) -> None:
        with self._writes.attempt(self._name, *self._also):
            self._sink.close(failed)


@dataclass(frozen=True, slots=True)
class _Client:
    """The two calls of a tracker's client. log: of the values and the step. finish: of whether the run failed.
    destination: where the curves are, for the note."""

    log: Callable[[dict[str, float], int], object]
    finish: Callable[[bool], object]
    destination: str

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        self.log(dict(values), step)

    def close(self, failed: bool = False) -> None:
        with redirect_stdout(io.StringIO()):
            self.finish(failed)


def _run_id(folder: Path, tracker: str) -> str:
    """The tracker's id of the run in this folder. A run that continues in the folder continues the tracker's run;
    repeated steps are logged again."""
    place = folder / tracker / "run_id"
    if not place.is_file():
        place.parent.mkdir(exist_ok=True)
        write_text(place, secrets.token_hex(4))
    return place.read_text(encoding="utf-8").strip()


def _tensorboard(folder: Path, cfg: MonitorConfig, resolved: dict[str, Any], first_step: int) -> _Client:
    """Event files in `folder`/tensorboard. TensorBoard does not show what earlier files have of repeated steps. A file
    whose write failed ends there, and the next step begins another one."""
    from torch.utils.tensorboard import SummaryWriter

    place = str(folder / "tensorboard")
    writer: Any = SummaryWriter(place, purge_step=first_step)
    last = 0

    def log(values: dict[str, float], step: int) -> None:
        nonlocal writer, last
        if writer is None or step < last:  # less than the last one: the run went back to a checkpoint
            finish(False)
            writer = SummaryWriter(place, purge_step=step)
        last = step
        try:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()
        except OSError:
            with suppress(OSError):
                finish(False)
            raise

    def finish(failed: bool) -> None:
        nonlocal writer
        closed, writer = writer, None
        if closed is not None:
            closed.close()

    return _Client(log, finish, f"tensorboard --logdir {place}")


def _wandb(folder: Path, cfg: MonitorConfig, resolved: dict[str, Any], first_step: int) -> _Client:
    """Its files are in `folder`/wandb. WANDB_MODE=offline retains them on this machine until `wandb sync`."""
    import wandb

    run = wandb.init(
        project=cfg.wandb_project or os.environ.get("WANDB_PROJECT", "meshrl"),
        name=folder.name,
        id=_run_id(folder, "wandb"),
        resume="allow",  # a run of this id, if there is one
        dir=str(folder),
        config=resolved,
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    upload = f"offline; upload it with: wandb sync {Path(run.dir).parent}"
    return _Client(
        lambda values, step: run.log({"step": step, **values}),
        lambda failed: run.finish(exit_code=int(failed)),
        upload if run.offline else run.url or "disabled by WANDB_MODE",
    )


def _mlflow(folder: Path, cfg: MonitorConfig, resolved: dict[str, Any], first_step: int) -> _Client:
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME have their usual effect. Parameters of a run are constant there,
    so those of its first part stay."""
    import mlflow

    place = folder / "mlflow" / "run_id"
    if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
        mlflow.set_experiment("meshrl")
    if place.is_file():
        mlflow.start_run(run_id=place.read_text(encoding="utf-8").strip())
    else:
        run = mlflow.start_run(run_name=folder.name)
        mlflow.log_params({_name(key): str(value)[:6000] for key, value in leaves(resolved).items()})  # its limit
        place.parent.mkdir(exist_ok=True)
        write_text(place, run.info.run_id)
    return _Client(
        lambda values, step: mlflow.log_metrics({_name(name): value for name, value in values.items()}, step),
        lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"),
        mlflow.get_tracking_uri(),
    )


def _name(name: str) -> str:
    """With the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _swanlab(folder: Path, cfg: MonitorConfig, resolved: dict[str, Any], first_step: int) -> _Client:
    """Its files are in `folder`/swanlab. SWANLAB_MODE=offline retains them on this machine until `swanlab sync`."""
    import swanlab

    run = swanlab.init(
        project=os.environ.get("SWANLAB_PROJECT", "meshrl"),
        name=folder.name,
        id=_run_id(folder, "swanlab"),
        resume="allow",
        log_dir=str(folder / "swanlab"),
        config=resolved,
        settings=swanlab.Settings(terminal={"proxy_type": "none"}),
    )
    return _Client(
        run.log,
        lambda failed: run.finish("crashed", "the run failed") if failed else run.finish(),
        f"{os.environ.get('SWANLAB_MODE', 'online')}, files in {folder / 'swanlab'}",
    )


def _trackio(folder: Path, cfg: MonitorConfig, resolved: dict[str, Any], first_step: int) -> _Client:
    """TRACKIO_DIR and TRACKIO_SPACE_ID have their usual effect."""
    import trackio

    project, name = os.environ.get("TRACKIO_PROJECT", "meshrl"), f"{folder.name}-{_run_id(folder, 'trackio')}"
    own = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(project=project, name=name, config=resolved, resume="allow", **own)
    return _Client(run.log, lambda failed: run.finish(), f"trackio show --project {project} (run {name})")


def prometheus_name(metric: str) -> str:
    """The name of a metric in the text that Prometheus reads: reward/mean -> meshrl_reward_mean."""
    return re.sub(r"\W", "_", f"meshrl_{metric}", flags=re.ASCII)


def _prometheus(folder: Path, cfg: MonitorConfig, resolved: dict[str, Any], first_step: int) -> _Client:
    """The newest values, for this machine, until the run ends."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry, gauges = CollectorRegistry(), dict[str, Any]()
    server, thread = start_http_server(cfg.prometheus_port, "127.0.0.1", registry)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in {"step": step, **values}.items():
            key = prometheus_name(name)
            if key not in gauges:
                gauges[key] = Gauge(key, f"docs/metrics.md: {name}", ["run"], registry=registry)
            gauges[key].labels(folder.name).set(value)

    def finish(failed: bool) -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return _Client(log, finish, f"http://127.0.0.1:{cfg.prometheus_port}/metrics")


_CLIENTS: dict[str, tuple[Callable[[Path, MonitorConfig, dict[str, Any], int], _Client], str]] = {
    "tensorboard": (_tensorboard, "Remove what is in the place of RUN/tensorboard, or free space on its disk"),
    "wandb": (
        _wandb,
        "Run `wandb login` (or set WANDB_API_KEY), set WANDB_MODE=offline to keep the run on this machine, remove "
        "wandb/run_id of the run's folder if the W&B run was deleted",
    ),
    "mlflow": (
        _mlflow,
        "Set MLFLOW_TRACKING_URI to a server's address or to sqlite:///FILE, remove mlflow/run_id of the run's folder "
        "if the MLflow run was deleted",
    ),
    "swanlab": (
        _swanlab,
        "Run `swanlab login` (or set SWANLAB_API_KEY), set SWANLAB_MODE=offline to keep the run on this machine",
    ),
    "trackio": (_trackio, "Set TRACKIO_DIR to a writable folder"),
    "prometheus": (_prometheus, "Set monitor.prometheus_port to a free port"),
}
"""monitor.sinks -> (how it is opened, what to do where it can't be)."""
