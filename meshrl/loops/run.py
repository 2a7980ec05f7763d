"""What `meshrl train`, `sft` and `eval` do, from the command line or from Python: make the run's folder, load the
task, start the ranks, run the loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshrl.agent.loop import AGENTS, resolve_agent
from meshrl.algo.trial import try_own_functions
from meshrl.cluster.launch import launched
from meshrl.cluster.torchrun import follow, is_follower
from meshrl.config.cluster import ClusterConfig
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.device import device_notice
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Prompt, Trajectory
from meshrl.data.chat import load_tokenizer, stop_token_ids
from meshrl.data.datasets import PromptMaker, load_sft_rows
from meshrl.data.feed import load_eval_prompts, open_feed
from meshrl.data.order import SftSource
from meshrl.loops.checkpoints import Checkpoints
from meshrl.loops.colocated import colocated
from meshrl.loops.evaluate import evaluate_prompts
from meshrl.loops.export import export_to, model_folder, read_best
from meshrl.loops.inputs import NO_OBJECTS, Objects
from meshrl.loops.job import Job, Task
from meshrl.loops.on_step import StepCallback
from meshrl.loops.own_loop import run_in_own_loop
from meshrl.loops.record import recorded
from meshrl.loops.restart import noticed, through_failures
from meshrl.loops.resume import restore, save_now
from meshrl.loops.sft import SftJob
from meshrl.loops.sft import sft as sft_loop
from meshrl.loops.step import note_run_without_signal
from meshrl.loops.stop import Stop, save_at_the_end
from meshrl.loops.watch import watched
from meshrl.model.limits import vocab_size_of
from meshrl.monitor.curve import save_curve
from meshrl.monitor.memory import memory_metrics
from meshrl.monitor.metrics import divide, merge, units
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.process.leases import sweep
from meshrl.reward.kinds import NEEDS_ANSWER
from meshrl.reward.score import Scorer
from meshrl.reward.self_test import NUM_ROWS, try_built_in, try_on_answers

T = TypeVar("T")


def train(loaded: Loaded[RunConfig], objects: Objects = NO_OBJECTS) -> Path:
    """`meshrl train`: run the configured loop to its end. Returns the run's folder."""
    return _run(loaded.config.cluster, lambda stop: _train(stop, loaded, objects))


def evaluate(loaded: Loaded[RunConfig], objects: Objects = NO_OBJECTS) -> tuple[dict[str, float], list[Trajectory]]:
    """`meshrl eval`: answer the held-out prompts with the model of the config, train nothing. Returns the metrics and
    the scored answers."""
    return _run(loaded.config.cluster, lambda stop: _evaluate(loaded.config, objects))


def sft(loaded: Loaded[SftRunConfig], objects: Objects = NO_OBJECTS) -> Path:
    """`meshrl sft`: supervised fine-tuning. Returns the run's folder."""
    return _run(loaded.config.cluster, lambda stop: _sft(stop, loaded, objects))


def _run(cluster: ClusterConfig, main: Callable[[Stop], Coroutine[Any, Any, T]]) -> T:
    """Run to the end. Ctrl-C and SIGTERM unwind it, so that no rank outlives the run (P31). Of the processes that
    torchrun started, rank 0 does all this, and the others hold its ranks. What dead runs have left on any of their
    machines goes first.

    Raises: KeyboardInterrupt after Ctrl-C; SystemExit with 143 after SIGTERM, and in a process that held ranks for
    another, with the exit code of that.
    """
    sweep()
    if is_follower():
        raise SystemExit(follow())
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # dotted paths of the config may name a module that lies here
    if (notice := device_notice()) is not None:
        print(f"note: {notice}", file=sys.stderr)

    stop = Stop()

    async def guarded() -> T:
        with stop.listening(), watched(cluster):
            return await main(stop)

    try:
        return run_in_own_loop(guarded())
    except asyncio.CancelledError:
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        print("meshrl: ended by SIGTERM", file=sys.stderr)
        raise SystemExit(143) from None


async def _train(stop: Stop, loaded: Loaded[RunConfig], objects: Objects) -> Path:
    cfg = loaded.config
    try_own_functions(cfg.algo)
    with recorded(loaded, "train", cfg.loop.num_steps, objects.quiet) as record:
        if objects.on_step is not None:
            record.sinks.append(StepCallback(objects.on_step, stop))
        record.note(f"run {record.folder}: starting {_ranks(cfg)}")
        loading = asyncio.create_task(asyncio.to_thread(_load_task, cfg, objects, True))
        async with (
            # First: a reward that can't work and a bad row are found before any rank starts.
            _grading(cfg, objects, loading, record.note) as (scorer, tried),
            launched(
                cfg.model,
                cfg.train,
                cfg.rollout,
                cfg.cluster,
                num_train_ranks=cfg.cluster.num_train_ranks,
                num_rollout_ranks=cfg.cluster.num_rollout_ranks,
                reference=cfg.algo.kl.coef > 0,
            ) as groups,
            Checkpoints(record.folder, groups.trainer, cfg.run.keep_checkpoints, record.note) as checkpoints,
        ):
            assert groups.trainer is not None and groups.rollouts is not None
            groups.rollouts.note = record.note
            stop.can_fall_back = lambda: checkpoints.newest_on_disk() > 0
            with noticed(groups):
                layout = await groups.trainer.layout(cfg.rollout.sync_bucket_bytes)
                await groups.rollouts.reconcile(layout)
                task = await tried
            told = _tell_left_out(record.note, task, cfg)
            record.note(f"ready after {record.seconds:.1f} s")
            job = Job(
                cfg=cfg,
                folder=record.folder,
                task=task,
                trainer=groups.trainer,
                rollouts=groups.rollouts,
                scorer=scorer,
                layout=layout,
                sinks=record.sinks,
                note=record.note,
                rollout_log=RolloutLog(record.folder, task.tokenizer.decode),
                checkpoints=checkpoints,
                stop=stop,
                spans=record.spans,
            )
            record.summary = partial(_summary, job)
            loop = LOOPS[cfg.loop.kind]
            try:
                await through_failures(job, groups, record, layout, partial(restore, job), partial(loop, job))
            except asyncio.CancelledError:
                await save_at_the_end(stop, checkpoints, job.step, partial(save_now, job), record.note)
                raise
        save_curve(record.folder / "reward.png", list(range(1, job.step + 1)), job.rewards, job.evals)
        _tell_left_out(record.note, task, cfg, told)
        note_run_without_signal(job)
        record.note(f"done: {job.step} steps in {record.seconds:.0f} s; see {record.folder / 'report.html'}")
    return record.folder


@asynccontextmanager
async def _grading(
    cfg: RunConfig, objects: Objects, loading: asyncio.Task[Task], note: Callable[[str], None]
) -> AsyncIterator[tuple[Scorer, asyncio.Task[Task]]]:
    """A started Scorer, whose workers end with the block, after the self-tests of its built-in terms; and what loads,
    to be awaited once more: by then a user's reward functions have been tried on the rows."""
    scorer, tried = Scorer(cfg.reward, objects.rewards), None
    try:
        await scorer.start()
        await try_built_in(scorer, cfg.reward.terms, note)
        tried = asyncio.create_task(_tried(cfg, scorer, loading, note))
        await loading  # also because Transformers' lazy imports are not safe in two threads of one process
        yield scorer, tried
    finally:
        if tried is not None:
            tried.cancel()
        await scorer.close()


async def _tried(cfg: RunConfig, scorer: Scorer, loading: asyncio.Task[Task], note: Callable[[str], None]) -> Task:
    """The loaded task. A user's agent may leave its own judgement in the messages for a reward function to read, which
    bare answers lack: nothing is tried then."""
    task = await loading
    if cfg.agent.kind in AGENTS:
        await try_on_answers(scorer, cfg.reward, _first_prompts(task), note)
    return task


def _first_prompts(task: Task) -> list[Prompt]:
    """A few prompts, of the training rows where there are any; the feed stays where it was."""
    feed = task.train_prompts
    if feed is None:
        return task.eval_prompts[:NUM_ROWS]
    place = feed.state()
    prompts = feed.next(NUM_ROWS)
    feed.load_state(place)
    return prompts


def _load_task(cfg: RunConfig, objects: Objects, training: bool) -> Task:
    """Tokenizer, prompts and agent; runs in a thread while the ranks start."""
    tokenizer = load_tokenizer(cfg.model.path, cfg.data.chat_template, cfg.data.chat_template_kwargs)
    agent = resolve_agent(cfg.agent) if objects.agent is None else objects.agent
    answer_for = [name for name, term in cfg.reward.terms.items() if term.kind in NEEDS_ANSWER]
    make = PromptMaker(cfg.data, tokenizer, agent.tools, vocab_size_of(cfg.model.path), answer_for)
    feed = open_feed(make, cfg.run.seed, objects.table("data.path")) if training else None
    held_out, num_eval_left_out = load_eval_prompts(make, objects.table("data.eval_path"))
    return Task(
        tokenizer=tokenizer,
        agent=agent,
        train_prompts=feed,
        eval_prompts=held_out,
        num_eval_left_out=num_eval_left_out,
        stop_token_ids=stop_token_ids(tokenizer, cfg.model.path),
        max_context_tokens=_max_context(cfg),
    )


def _tell_left_out(note: Callable[[str], None], task: Task, cfg: RunConfig, told: int | None = None) -> int:
    """A line about prompts that are too long, and how many it counts. Called at the start and, with what was `told`
    then, at the end: streaming finds them one by one."""
    assert task.train_prompts is not None
    found, limit = task.train_prompts.num_left_out, cfg.data.max_prompt_tokens
    if found > (told or 0):
        note(f"left out {found} training prompts over {limit} tokens")
    if told is None and task.num_eval_left_out:
        note(f"left out {task.num_eval_left_out} held-out prompts over {limit} tokens")
    return found


def _max_context(cfg: RunConfig) -> int:
    """rollout.max_context_tokens, else what the model's config says, else what the data's limits add up to."""
    if cfg.rollout.max_context_tokens is not None:
        return cfg.rollout.max_context_tokens
    facts = Path(cfg.model.path) / "config.json"
    known = json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {}
    known = known.get("text_config", known)
    return known.get("max_position_embeddings") or cfg.data.max_prompt_tokens + cfg.rollout.sampling.max_new_tokens


async def _evaluate(cfg: RunConfig, objects: Objects) -> tuple[dict[str, float], list[Trajectory]]:
    def note(text: str) -> None:
        if not objects.quiet:
            print(text, file=sys.stderr)

    loading = asyncio.create_task(asyncio.to_thread(_load_task, cfg, objects, False))
    if not (await loading).eval_prompts:
        raise MeshrlError("meshrl eval needs data.eval_path; set it to a JSONL file of held-out rows")
    ranks = cfg.cluster.num_rollout_ranks or cfg.cluster.num_train_ranks
    async with (
        _grading(cfg, objects, loading, note) as (scorer, tried),
        launched(cfg.model, cfg.train, cfg.rollout, cfg.cluster, num_train_ranks=0, num_rollout_ranks=ranks) as groups,
    ):
        assert groups.rollouts is not None
        await groups.rollouts.trust_loaded_weights()
        task = await tried
        trajectories, metrics = await evaluate_prompts(cfg, task, groups.rollouts, scorer, min_version=0)
    merged = merge(metrics)
    values, names = divide(merged), units(merged)
    for name, value in values.items() if not objects.quiet else ():
        print(f"{name:<28} {value:.4g} {names[name]}")
    return values, trajectories


async def _sft(stop: Stop, loaded: Loaded[SftRunConfig], objects: Objects) -> Path:
    cfg = loaded.config

    def load() -> tuple[SftSource, int, str | None]:
        path = cfg.model.path
        tokenizer = load_tokenizer(path, cfg.sft.chat_template, cfg.sft.chat_template_kwargs)
        stops = stop_token_ids(tokenizer, path)
        table = objects.table("sft.path") or cfg.sft.path
        rows, left_out = load_sft_rows(table, cfg.sft, tokenizer, stops, vocab_size_of(path))
        template = tokenizer.chat_template if cfg.sft.chat_template is not None else None
        return SftSource(rows, cfg.run.seed, cfg.sft.shuffle), left_out, template

    with recorded(loaded, "sft", cfg.sft.num_steps, objects.quiet) as record:
        if objects.on_step is not None:
            record.sinks.append(StepCallback(objects.on_step, stop))
        source, left_out, template = await asyncio.to_thread(load)  # a bad row is found before any rank starts
        ranks = cfg.cluster.num_train_ranks
        async with (
            launched(cfg.model, cfg.train, None, cfg.cluster, num_train_ranks=ranks, num_rollout_ranks=0) as groups,
            Checkpoints(record.folder, groups.trainer, cfg.run.keep_checkpoints, record.note) as checkpoints,
        ):
            assert groups.trainer is not None
            if left_out:
                record.note(f"left out {left_out} rows over {cfg.sft.max_row_tokens} tokens")
            stop.can_fall_back = lambda: checkpoints.newest_on_disk() > 0
            job = SftJob(
                cfg,
                groups.trainer,
                source,
                record.report,
                checkpoints,
                stop,
                source.state(),
                record.spans,
                record.note,
                template,
            )
            record.summary = lambda: {"steps": len(job.losses), "loss_curve": job.losses}
            try:
                await through_failures(job, groups, record, None, job.restore, partial(sft_loop, job))
            except asyncio.CancelledError:
                await save_at_the_end(stop, checkpoints, len(job.losses), job.save, record.note)
                raise
            path = model_folder(record.folder, len(job.losses))
            await export_to(groups.trainer, path, cfg.model.path, template)
            record.summary = lambda: {"steps": len(job.losses), "loss_curve": job.losses, "model": str(path)}
        record.note(f"wrote {path}; see {record.folder / 'report.html'}")
    return record.folder


def _ranks(cfg: RunConfig) -> str:
    where = "colocated samplers" if not cfg.cluster.num_rollout_ranks else f"{cfg.cluster.num_rollout_ranks} samplers"
    return f"{cfg.cluster.num_train_ranks} train ranks, {where}, executor {cfg.cluster.executor}"


def _summary(job: Job) -> dict[str, Any]:
    """The run in a few numbers, for result.json. model: the newest that was written."""
    rss = next(m.sum for m in memory_metrics() if m.name == "memory/rss_bytes")
    best = read_best(job.folder)
    return {
        "steps": job.step,
        "evals": [{"step": step, "mean_at_k": value} for step, value in job.evals],
        "reward_curve": job.rewards,
        "final_rss_bytes": int(rss),
        "model": str(model_folder(job.folder, job.exported_step)) if job.exported_step else None,
        "best": {"step": best.step, "mean_at_k": best.score, "model": best.model} if best else None,
    }


LOOPS = {"colocated": colocated}
