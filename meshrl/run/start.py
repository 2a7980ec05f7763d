"""`meshrl train`, `sft` and `eval` as processes, from the command line or from Python: the checks of the machine, the
event loop, signals and exit codes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from meshrl.cluster.launch import check_devices
from meshrl.cluster.remote import follow, is_follower, is_launched, is_restarted
from meshrl.cluster.worker import prepare_ranks
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.device import device_notice
from meshrl.core.terminal import print_message
from meshrl.loops.colocated import colocated
from meshrl.loops.fully_async import fully_async
from meshrl.loops.one_step_off import one_step_off
from meshrl.monitor.status import STOP_FILE
from meshrl.process.leases import sweep
from meshrl.run import assemble
from meshrl.run.evaluation import Convert, Evaluated, run_evaluation
from meshrl.run.inputs import NO_OBJECTS, Objects, WriteReport
from meshrl.run.signals import Stop, run_in_own_loop, watchdog
from meshrl.run.subject import Subject

T = TypeVar("T")


def train(loaded: Loaded[RunConfig], write_report: WriteReport, objects: Objects = NO_OBJECTS) -> Path:
    """`meshrl train`: run the configured loop to its end. Returns the run's folder."""
    cfg = loaded.config
    ranks = cfg.cluster.num_train_ranks, cfg.cluster.num_rollout_ranks
    return _run(
        cfg, ranks, objects, lambda stop: assemble.train(stop, loaded, write_report, objects, LOOPS[cfg.loop.kind])
    )


def evaluate(
    loaded: Loaded[RunConfig],
    subject: Subject,
    out: Path | None,
    write_report: WriteReport,
    convert: Convert,
    objects: Objects,
) -> Evaluated:
    """`meshrl eval`: answer the held-out prompts with a model, without training."""
    cfg = loaded.config
    ranks = 0, cfg.sampling_ranks[1]
    of_run = loaded, subject, out, write_report, convert, objects
    return _run(cfg, ranks, objects, lambda stop: run_evaluation(stop, *of_run))


def sft(loaded: Loaded[SftRunConfig], write_report: WriteReport, objects: Objects = NO_OBJECTS) -> Path:
    """`meshrl sft`: supervised fine-tuning. Returns the run's folder."""
    cfg = loaded.config
    return _run(
        cfg, (cfg.cluster.num_train_ranks, 0), objects, lambda stop: assemble.sft(stop, loaded, write_report, objects)
    )


def _run(
    cfg: RunConfig | SftRunConfig,
    num_ranks: tuple[int, int],
    objects: Objects,
    main: Callable[[Stop], Coroutine[Any, Any, T]],
) -> T:
    """Remove temporary resources of dead runs on this machine, then run `main` to its end. Ctrl-C, SIGTERM and
    SIGHUP cancel it, so that no rank outlives the run. Under torchrun only the process of rank 0 does this; the others
    are node agents. num_ranks: that train, that only sample.
    """
    prepare_ranks(cfg.cluster)
    sweep()
    note = check_devices(cfg.cluster, cfg.rollout if isinstance(cfg, RunConfig) else None, *num_ranks)
    folder = Path(cfg.run.folder, cfg.run.name)
    if is_restarted() and (folder / STOP_FILE).is_file():  # else a stopped run would go on costing
        print_message(f"meshrl: `meshrl stop` has ended {folder}; to continue it, remove {folder / STOP_FILE}")
        raise SystemExit(0)
    if is_follower():
        raise SystemExit(follow(Path(cfg.run.folder)))
    if (notice := device_notice()) is not None:
        print_message(f"note: {notice}")
    if note is not None and not objects.quiet:
        print_message(f"note: {note}")

    stop = Stop()

    async def guarded() -> T:
        with stop.listening(), watchdog(cfg.cluster):
            return await main(stop)

    try:
        return run_in_own_loop(guarded(), f"agent {cfg.agent.kind}" if isinstance(cfg, RunConfig) else "the run")
    except asyncio.CancelledError:
        if stop.signal is None:  # user code has raised it
            raise
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        print_message(f"meshrl: ended by {signal.Signals(stop.signal).name}")
        if is_launched() and stop.is_of_command:
            raise SystemExit(0) from None  # a failure would make torchrun start the run again
        raise SystemExit(128 + stop.signal) from None


LOOPS = {"colocated": colocated, "one_step_off": one_step_off, "fully_async": fully_async}
