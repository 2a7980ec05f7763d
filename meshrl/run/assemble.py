"""`meshrl train` and `sft`: the parts of a run, joined, and run to the end of its loop."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.agent.loop import RunOfAgent, Task
from meshrl.agent.resolve import opened
from meshrl.algo.trial import try_user_functions
from meshrl.cluster.launch import Groups, launched
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.load import Loaded
from meshrl.config.model import ModelConfig
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.best_models import read_best
from meshrl.core.terminal import counted
from meshrl.data.chat import ChatFiles
from meshrl.data.decode import text_of
from meshrl.loops.evaluate import evaluation_identity
from meshrl.loops.finish_step import run_without_signal
from meshrl.loops.job import Job
from meshrl.loops.sft import SftJob
from meshrl.loops.sft import sft as sft_loop
from meshrl.model.limits import note_on_balance_loss
from meshrl.monitor.metrics import memory_metrics
from meshrl.monitor.notes import NOTES_FILE
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.plan.disk_use import disk_use
from meshrl.reward.score import Scorer
from meshrl.run.folder import LOGS, bytes_of, wait_for_folder
from meshrl.run.inputs import Objects, WriteReport
from meshrl.run.keeper import Checkpoints, Keeper
from meshrl.run.models import newest_model
from meshrl.run.outputs import LiveRun, live_run
from meshrl.run.provenance import start_record
from meshrl.run.restart import run_to_end
from meshrl.run.signals import Stop
from meshrl.run.task import (
    first_prompt,
    load_sft_source,
    load_task,
    note_on_default_reward,
    note_on_overlap,
    note_on_special,
    reward_workers,
)
from meshrl.run.verdict import read_verdict

Loop = Callable[[Job], Awaitable[None]]


@asynccontextmanager
async def sampling(
    run: LiveRun, task: Task, num_train_ranks: int, num_rollout_ranks: int, model: ModelConfig | None = None
) -> AsyncIterator[tuple[Scorer, asyncio.Task[None], Groups]]:
    """The parts of a run that samples: reward workers, with the trial of the user's reward functions, which detects
    those that can't work; the agent for its lifetime; the ranks. They end in the reverse order, also after an error.
    model: in place of the config's."""
    cfg, out = run.loaded.config, run.out
    async with (
        reward_workers(cfg, run.objects, task, out.note, out.reward_log.write) as (scorer, trial),
        opened(task.agent, RunOfAgent(folder=run.folder, note=out.note), cfg.agent.kind),
        launched(
            *(cfg, num_train_ranks, num_rollout_ranks, model, run.folder.absolute() / LOGS, out.note, out.progress),
            memory=run.run_plan.memory,
        ) as groups,
    ):
        out.status.show_processes(groups.executor.processes)
        yield scorer, trial, groups


def _checkpoints(run: LiveRun, trainer: TrainGroup) -> Checkpoints:
    keep = run.loaded.config.run.keep_checkpoints
    return Checkpoints(run.folder, trainer, keep, run.out.note, run.out.add)


async def train(stop: Stop, loaded: Loaded[RunConfig], write_report: WriteReport, objects: Objects, loop: Loop) -> Path:
    try_user_functions(loaded.config.algo)
    await wait_for_folder(loaded.config.run)
    with live_run(loaded, "train", loaded.config.loop.num_steps, stop, write_report, objects) as run:
        cfg, out, job = run.loaded.config, run.out, None
        _note_start(run)
        task = await asyncio.to_thread(load_task, cfg, objects, True)  # detects bad rows before any rank starts
        if (prompt := first_prompt(task)) is not None:
            out.note(f"first prompt: {prompt}")
        notes = (note_on_default_reward(loaded), note_on_overlap(task), task.tool_note, task.row_note)
        for note in filter(None, notes):
            out.note(f"note: {note}")
        if (special := note_on_special(task)) is not None:
            out.record(special)
        ranks = cfg.cluster.num_train_ranks, cfg.cluster.num_rollout_ranks
        try:
            async with sampling(run, task, *ranks) as (scorer, trial, groups):
                assert groups.trainer is not None and groups.rollouts is not None and task.train_prompts is not None
                layout = await groups.until_failure(groups.trainer.layout(cfg.rollout.sync_bucket_bytes))
                await groups.until_failure(groups.rollouts.reconcile(layout))
                await groups.until_failure(trial)
                evaluation = evaluation_identity(cfg, task, scorer)
                decode = partial(text_of, task.tokenizer, special=True)
                template = task.tokenizer.chat_template if cfg.data.chat_template is not None else None
                chat = ChatFiles(template, task.stop_token_ids)
                async with _checkpoints(run, groups.trainer) as checkpoints:
                    keeper = Keeper(run, checkpoints, chat, evaluation)
                    planned = run.run_plan.config
                    assert isinstance(planned, RunConfig)
                    out.record_start(start_record(planned, chat, run.start, run.folder))
                    job = Job(
                        cfg=cfg,
                        run=out,
                        keeper=keeper,
                        task=task,
                        trainer=groups.trainer,
                        rollouts=groups.rollouts,
                        scorer=scorer,
                        layout=layout,
                        rollout_log=RolloutLog(
                            run.folder, decode, out.writes, cfg.monitor.rollout_log_every_steps, out.note
                        ),
                        cursor=task.train_prompts.state(),
                        evaluation=evaluation,
                    )
                    num_left_out = job.feed.num_left_out
                    _note_left_out(job, num_left_out, task.num_eval_left_out)
                    await _note_ready(run, keeper, job.trainer, bool(task.eval_prompts))
                    with garbage_of_the_run(cfg.cluster.executor == "inline"):
                        await run_to_end(run, keeper, job, groups, layout, partial(loop, job))
        finally:
            if job is not None:
                out.result.update(_summary(run, job))
        if job.feed.num_left_out > num_left_out:  # streaming finds them one by one
            _note_left_out(job, job.feed.num_left_out)
        no_signal = out.result["no_signal"] = run_without_signal(job)
        if no_signal is not None:
            out.note(no_signal)
        if (verdict := read_verdict(run.folder)) is not None:
            for line in verdict.lines:
                out.note(line)
        _note_end(run, job.step, " without a training signal" if no_signal else "")
    return run.folder


async def sft(stop: Stop, loaded: Loaded[SftRunConfig], write_report: WriteReport, objects: Objects) -> Path:
    await wait_for_folder(loaded.config.run)
    with live_run(loaded, "sft", loaded.config.sft.num_steps, stop, write_report, objects) as run:
        cfg, out, job = run.loaded.config, run.out, None
        _note_start(run)
        source, held_out, left_out_notes, chat = await asyncio.to_thread(load_sft_source, cfg, objects)
        try:
            ranks, memory = cfg.cluster.num_train_ranks, run.run_plan.memory
            async with launched(cfg, ranks, 0, progress=out.progress, memory=memory) as groups:
                assert groups.trainer is not None
                out.status.show_processes(groups.executor.processes)
                for note in left_out_notes:
                    out.note(note)
                async with _checkpoints(run, groups.trainer) as checkpoints:
                    keeper, trainer, cursor = Keeper(run, checkpoints, chat), groups.trainer, source.state()
                    job = SftJob(cfg, out, keeper, trainer, source, held_out, cursor)
                    await _note_ready(run, keeper, trainer)
                    await run_to_end(run, keeper, job, groups, None, partial(sft_loop, job))
        finally:
            if job is not None:
                losses = {"loss_curve": job.losses, "held_out_losses": job.held_out_losses}
                out.result.update({"steps": job.step, **losses, "model": newest_model(run.folder)})
        _note_end(run, job.step)
    return run.folder


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


def _note_start(run: LiveRun) -> None:
    cluster = run.loaded.config.cluster
    samplers = ""
    if run.kind == "train":
        num = cluster.num_rollout_ranks
        samplers = f"{counted(num, 'sampler rank')}, " if num else "colocated samplers, "
    trainers = counted(cluster.num_train_ranks, "train rank")
    run.out.note(f"run {run.folder}: starting {trainers}, {samplers}executor {cluster.executor}")
    if run.run_plan.note is not None:
        run.out.record(run.run_plan.note)


async def _note_ready(run: LiveRun, keeper: Keeper, trainer: TrainGroup, has_evaluations: bool = False) -> None:
    out = run.out
    await keeper.try_export()
    out.note(f"ready after {out.seconds:.1f} s; {NOTES_FILE} has more about the start")
    attention, *warnings = await trainer.compute_notes()
    out.record(attention)
    if unused := note_on_balance_loss(run.loaded.config.model, run.loaded.config.train):
        out.note(unused)
    sizes = await trainer.state_bytes(), await trainer.model_bytes()
    used, free = bytes_of(run.folder) if run.start is not None else 0, shutil.disk_usage(run.folder).free
    disk, *full = disk_use(run.loaded.config, *sizes, has_evaluations, used, free).splitlines()
    out.record(disk)
    for warning in warnings + full:
        out.note(warning)


def _note_end(run: LiveRun, steps: int, how: str = "") -> None:
    run.out.writes.wait()
    since = f" ({steps - run.start.step} of them after the resume)" if run.start is not None else ""
    run.out.note(
        f"done: {counted(steps, 'step')}{since}{how} in {run.out.seconds:.0f} s; see {run.folder / 'report.html'}"
    )


def _note_left_out(job: Job, num_training: int, num_held_out: int = 0) -> None:
    for num, kind in ((num_training, "training"), (num_held_out, "held-out")):
        if num:
            job.run.note(f"left out {num} {kind} prompts over {job.cfg.data.max_prompt_tokens} tokens")


def _summary(run: LiveRun, job: Job) -> dict[str, Any]:
    """The run's entries for result.json. no_signal: as run_without_signal, once the run has ended."""
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
        "no_signal": None,
    }
