"""`meshrl train`, `sft` and `eval`, from the command line or from Python: create the run's folder, load the task, start
the ranks, run the loop."""

from __future__ import annotations

import asyncio
import gc
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshrl.algo.trial import try_user_functions
from meshrl.cluster.groups import TrainGroup
from meshrl.cluster.launch import check_devices, launched
from meshrl.cluster.rank_program import prepare_ranks
from meshrl.cluster.torchrun import follow, is_follower, is_launched, is_restarted
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.device import device_notice
from meshrl.core.terminal import counted, print_message
from meshrl.data.chat import ChatFiles
from meshrl.data.decode import text_of
from meshrl.loops.colocated import colocated
from meshrl.loops.evaluate import evaluation_identity
from meshrl.loops.finish_step import run_without_signal
from meshrl.loops.fully_async import fully_async
from meshrl.loops.job import Job
from meshrl.loops.one_step_off import one_step_off
from meshrl.loops.sft import SftJob
from meshrl.loops.sft import sft as sft_loop
from meshrl.model.limits import note_on_balance_loss
from meshrl.monitor.disk_use import WrittenSizes, disk_use
from meshrl.monitor.metrics import memory_metrics
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.status import STOP_FILE
from meshrl.plan.decisions import AUTO_SAVE_S
from meshrl.process.leases import sweep
from meshrl.run.evaluation import Convert, Evaluated, run_evaluation
from meshrl.run.folder import LOGS, bytes_of, newest_model, read_best
from meshrl.run.inputs import NO_OBJECTS, Objects
from meshrl.run.lease import wait_for_folder
from meshrl.run.live import LiveRun, WriteReport, live_run
from meshrl.run.restart import run_to_end
from meshrl.run.signals import Stop
from meshrl.run.subject import Subject
from meshrl.run.task import first_prompt, load_sft_source, load_task, note_on_overlap, note_on_special, reward_workers
from meshrl.run.verdict import read_verdict
from meshrl.run.watchdog import run_in_own_loop, watchdog

T = TypeVar("T")


def train(loaded: Loaded[RunConfig], write_report: WriteReport, objects: Objects = NO_OBJECTS) -> Path:
    """`meshrl train`: run the configured loop to its end. Returns the run's folder."""
    cfg = loaded.config
    ranks = cfg.cluster.num_train_ranks, cfg.cluster.num_rollout_ranks
    return _run(cfg, ranks, objects, lambda stop: _train(stop, loaded, write_report, objects))


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
    return _run(cfg, (cfg.cluster.num_train_ranks, 0), objects, lambda stop: _sft(stop, loaded, write_report, objects))


def _run(
    cfg: RunConfig | SftRunConfig,
    num_ranks: tuple[int, int],
    objects: Objects,
    main: Callable[[Stop], Coroutine[Any, Any, T]],
) -> T:
    """Remove temporary resources of dead runs on this machine, then run `main` to its end. Ctrl-C, SIGTERM and
    SIGHUP cancel it, so that no rank outlives the run. Under torchrun only the process of rank 0 does this; the others
    are node agents. num_ranks: that train, that only sample.

    Raises: ConfigError when this machine has too few devices; KeyboardInterrupt after Ctrl-C; SystemExit with 143 after
    SIGTERM, with 129 after SIGHUP, and in a node agent's process with its exit code; under torchrun with 0 after
    `meshrl stop`, and at once when torchrun or Slurm has started the stopped run again.
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
        if is_launched() and stop.is_of_command():
            raise SystemExit(0) from None  # a failure would make torchrun start the run again
        raise SystemExit(128 + stop.signal) from None


@contextmanager
def garbage_of_the_run(has_tensors: bool) -> Iterator[None]:
    """Python's garbage collector visits only objects that were made since the start of the run. With those of the
    imported modules it took a seventh of the controller's time for a request.

    has_tensors: the ranks are in this process (executor inline), so garbage may have much memory. Else it is collected
    after 10,000 new objects instead of 700, which took a quarter of the controller's time for 16,384 samples.
    """
    is_frozen = gc.get_freeze_count() > 0  # by the calling program; then its choice stays
    before = gc.get_threshold()
    if not is_frozen:
        gc.collect()
        gc.freeze()
        if not has_tensors:
            gc.set_threshold(10_000, *before[1:])
    try:
        yield
    finally:
        if not is_frozen:
            gc.set_threshold(*before)
            gc.unfreeze()


async def _train(stop: Stop, loaded: Loaded[RunConfig], write_report: WriteReport, objects: Objects) -> Path:
    cfg = loaded.config
    try_user_functions(cfg.algo)
    await wait_for_folder(cfg.run)
    with live_run(loaded, "train", cfg.loop.num_steps, stop, write_report, objects) as run:
        cfg = run.loaded.config
        _note_start(run)
        task = await asyncio.to_thread(load_task, cfg, objects, True)  # detects bad rows before any rank starts
        if (prompt := first_prompt(task)) is not None:
            run.note(f"first prompt: {prompt}")
        for note in filter(None, (note_on_overlap(task), note_on_special(task))):
            run.note(note)
        if task.tool_note:
            run.note(f"note: {task.tool_note}")
        template = task.tokenizer.chat_template if cfg.data.chat_template is not None else None
        run.chat = ChatFiles(template, task.stop_token_ids)
        async with (
            # Detects rewards that can't work.
            reward_workers(cfg, objects, task, run.note, run.reward_log.write) as (scorer, trial),
            launched(
                cfg,
                cfg.cluster.num_train_ranks,
                cfg.cluster.num_rollout_ranks,
                logs=run.folder.absolute() / LOGS,
            ) as groups,
        ):
            assert groups.trainer is not None and groups.rollouts is not None and task.train_prompts is not None
            run.status.ranks = groups.executor.processes
            groups.rollouts.replacement.note = run.note
            layout = await groups.until_failure(groups.trainer.layout(cfg.rollout.sync_bucket_bytes))
            await groups.until_failure(groups.rollouts.reconcile(layout))
            await groups.until_failure(trial)
            run.evaluation = evaluation_identity(cfg, task, scorer)
            decode = partial(text_of, task.tokenizer, special=True)
            job = Job(
                cfg=cfg,
                run=run,
                task=task,
                trainer=groups.trainer,
                rollouts=groups.rollouts,
                scorer=scorer,
                layout=layout,
                rollout_log=RolloutLog(run.folder, decode, run.writes, cfg.monitor.rollout_log_every_steps),
                cursor=task.train_prompts.state(),
                evaluation=run.evaluation,
            )
            num_left_out = job.feed.num_left_out
            _note_left_out(run, job, num_left_out, task.num_eval_left_out)
            await _note_ready(run, job.trainer, bool(task.eval_prompts))
            run.summary = partial(_summary, run, job)
            with garbage_of_the_run(cfg.cluster.executor == "inline"):
                await run_to_end(run, job, groups, layout, partial(LOOPS[cfg.loop.kind], job))
        if job.feed.num_left_out > num_left_out:  # streaming finds them one by one
            _note_left_out(run, job, job.feed.num_left_out)
        no_signal = run_without_signal(job)
        run.summary = partial(_summary, run, job, no_signal)
        if no_signal is not None:
            run.note(no_signal)
        if (verdict := read_verdict(run.folder)) is not None:
            for line in verdict.lines:
                run.note(line)
        _note_end(run, job.step, " without a training signal" if no_signal else "")
    return run.folder


async def _sft(stop: Stop, loaded: Loaded[SftRunConfig], write_report: WriteReport, objects: Objects) -> Path:
    cfg = loaded.config
    await wait_for_folder(cfg.run)
    with live_run(loaded, "sft", cfg.sft.num_steps, stop, write_report, objects) as run:
        cfg = run.loaded.config
        _note_start(run)
        source, left_out, run.chat = await asyncio.to_thread(load_sft_source, cfg, objects)
        async with launched(cfg, cfg.cluster.num_train_ranks, 0) as groups:
            assert groups.trainer is not None
            run.status.ranks = groups.executor.processes
            job = SftJob(cfg=cfg, run=run, trainer=groups.trainer, source=source, cursor=source.state())
            if left_out:
                run.note(f"left out {left_out} rows over {cfg.sft.max_row_tokens} tokens")
            await _note_ready(run, job.trainer)
            run.summary = lambda: {"steps": job.step, "loss_curve": job.losses, "model": newest_model(run.folder)}
            await run_to_end(run, job, groups, None, partial(sft_loop, job))
        _note_end(run, job.step)
    return run.folder


def _note_start(run: LiveRun) -> None:
    cluster = run.loaded.config.cluster
    samplers = ""
    if run.kind == "train":
        num = cluster.num_rollout_ranks
        samplers = f"{counted(num, 'sampler rank')}, " if num else "colocated samplers, "
    trainers = counted(cluster.num_train_ranks, "train rank")
    run.note(f"run {run.folder}: starting {trainers}, {samplers}executor {cluster.executor}")


async def _note_ready(run: LiveRun, trainer: TrainGroup, has_evaluations: bool = False) -> None:
    await run.try_export(trainer)
    run.note(f"ready after {run.seconds:.1f} s")
    for line in await trainer.compute_notes():
        run.note(line)
    if unused := note_on_balance_loss(run.loaded.config.model, run.loaded.config.train):
        run.note(unused)
    sizes = WrittenSizes(
        state_bytes=await trainer.state_bytes(),
        model_bytes=await trainer.model_bytes(),
        has_evaluations=has_evaluations,
        on_disk_bytes=bytes_of(run.folder) if run.start is not None else 0,
    )
    every_steps, free_bytes = run.save_every_steps, shutil.disk_usage(run.folder).free
    every_s = AUTO_SAVE_S if every_steps is None else 0.0
    run.note(disk_use(run.loaded.config, every_steps, every_s, sizes, free_bytes))


def _note_end(run: LiveRun, steps: int, how: str = "") -> None:
    run.writes.wait()
    run.note_recovered()
    since = f" ({steps - run.start.step} of them after the resume)" if run.start is not None else ""
    run.note(f"done: {counted(steps, 'step')}{since}{how} in {run.seconds:.0f} s; see {run.folder / 'report.html'}")


def _note_left_out(run: LiveRun, job: Job, num_training: int, num_held_out: int = 0) -> None:
    for num, kind in ((num_training, "training"), (num_held_out, "held-out")):
        if num:
            run.note(f"left out {num} {kind} prompts over {job.cfg.data.max_prompt_tokens} tokens")


def _summary(run: LiveRun, job: Job, no_signal: str | None = None) -> dict[str, Any]:
    """The run's entries for result.json. no_signal: as run_without_signal, when the run has ended."""
    rss = next(m.sum for m in memory_metrics() if m.name == "memory/rss_bytes")
    best, verdict = read_best(run.folder), read_verdict(run.folder)
    term = best.evaluation.get("term") if best else None
    return {
        "steps": job.step,
        "evals": [{"step": step, "mean_at_k": value, "term": job.cfg.eval_term} for step, value in job.evals],
        "reward_curve": job.rewards,
        "final_rss_bytes": int(rss),
        "model": newest_model(run.folder),
        "best": best and {"step": best.step, "mean_at_k": best.score, "term": term, "model": best.model},
        "verdict": verdict.facts if verdict else None,
        "no_signal": no_signal,
    }


LOOPS = {"colocated": colocated, "one_step_off": one_step_off, "fully_async": fully_async}
