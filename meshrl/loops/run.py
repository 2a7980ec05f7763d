"""What `meshrl train`, `sft` and `eval` do: make the run's folder, load the task, start the ranks, run the loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from meshrl.agent.loop import resolve_agent
from meshrl.cluster.launch import launched
from meshrl.config.explain import to_yaml
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.errors import MeshrlError
from meshrl.data.chat import load_tokenizer, stop_token_ids
from meshrl.data.datasets import load_prompts, load_sft_rows
from meshrl.data.sampler import PromptSource, SftSource
from meshrl.loops.colocated import colocated
from meshrl.loops.evaluate import evaluate_prompts
from meshrl.loops.export import export_to, model_folder
from meshrl.loops.job import Job, Task
from meshrl.loops.sft import sft as sft_loop
from meshrl.monitor.curve import save_curve
from meshrl.monitor.memory import memory_metrics
from meshrl.monitor.metrics import divide, merge, units
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.sinks import JsonlSink, Sink, TerminalSink
from meshrl.reward.score import Scorer


def train(loaded: Loaded[RunConfig]) -> int:
    """`meshrl train`: run the configured loop to its last step. Returns the exit code."""
    return _run(_train(loaded, loaded.config))


def evaluate(loaded: Loaded[RunConfig]) -> int:
    """`meshrl eval`: answer the held-out prompts with the model of the config, train nothing."""
    return _run(_evaluate(loaded.config))


def sft(loaded: Loaded[SftRunConfig]) -> int:
    """`meshrl sft`: supervised fine-tuning. Returns the exit code."""
    return _run(_sft(loaded, loaded.config))


def _run(main: Coroutine[Any, Any, None]) -> int:
    """Run to the end; SIGTERM unwinds like Ctrl-C, so that no rank outlives the run (P31)."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # dotted paths of the config may name a module that lies here

    async def guarded() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await main

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        print("meshrl: ended by SIGTERM", file=sys.stderr)
        return 143
    return 0


async def _train(loaded: Loaded[RunConfig], cfg: RunConfig) -> None:
    folder = _new_folder(loaded, cfg.run.folder, cfg.run.name)
    began = time.monotonic()
    terminal = TerminalSink(cfg.loop.num_steps)
    metrics = JsonlSink(folder / "metrics.jsonl")
    terminal.note(f"run {folder}: starting {_ranks(cfg)}")
    loading = asyncio.create_task(asyncio.to_thread(_load_task, cfg, True))
    if cfg.cluster.executor == "inline":
        await loading  # Transformers' lazy imports are not safe in two threads of one process
    with closing(terminal), closing(metrics):
        async with (
            _grading(cfg) as scorer,  # first: a reward that can't work is found before any model is loaded
            launched(
                cfg.model,
                cfg.train,
                cfg.rollout,
                cfg.cluster,
                num_train_ranks=cfg.cluster.num_train_ranks,
                num_rollout_ranks=cfg.cluster.num_rollout_ranks,
                reference=cfg.algo.kl.coef > 0,
            ) as groups,
        ):
            assert groups.trainer is not None and groups.rollouts is not None
            layout = await groups.trainer.layout(cfg.rollout.sync_bucket_bytes)
            await groups.rollouts.reconcile(layout)
            task = await loading
            if task.num_too_long:
                terminal.note(f"left out {task.num_too_long} prompts over {cfg.data.max_prompt_tokens} tokens")
            terminal.note(f"ready after {time.monotonic() - began:.1f} s")
            job = Job(
                cfg=cfg,
                folder=folder,
                task=task,
                trainer=groups.trainer,
                rollouts=groups.rollouts,
                scorer=scorer,
                layout=layout,
                sinks=(metrics, terminal),
                note=terminal.note,
                rollout_log=RolloutLog(folder, task.tokenizer.decode),
            )
            await LOOPS[cfg.loop.kind](job)
        _write_result(job, time.monotonic() - began)
        terminal.note(f"done: {job.step} steps in {time.monotonic() - began:.0f} s; see {folder}")


@asynccontextmanager
async def _grading(cfg: RunConfig) -> AsyncIterator[Scorer]:
    """A started Scorer, whose workers end with the block."""
    scorer = Scorer(cfg.reward)
    try:
        await scorer.start()
        yield scorer
    finally:
        await scorer.close()


def _load_task(cfg: RunConfig, training: bool) -> Task:
    """Tokenizer, prompts and agent; runs in a thread while the ranks start."""
    tokenizer = load_tokenizer(cfg.model.path)
    agent = resolve_agent(cfg.agent)
    source, too_long = None, 0
    if training:
        prompts, too_long = load_prompts(cfg.data.path, cfg.data, tokenizer, tools=agent.tools)
        source = PromptSource(prompts, cfg.run.seed, cfg.data.shuffle)
    held_out = []
    if cfg.data.eval_path is not None:
        held_out, _ = load_prompts(
            cfg.data.eval_path, cfg.data, tokenizer, limit=cfg.data.eval_limit, tools=agent.tools
        )
        for i, prompt in enumerate(held_out):
            prompt.ordinal = -1 - i  # seeds of evaluation never meet those of training, whose ordinals count up from 0
    return Task(
        tokenizer=tokenizer,
        agent=agent,
        train_prompts=source,
        eval_prompts=held_out,
        num_too_long=too_long,
        stop_token_ids=stop_token_ids(tokenizer, cfg.model.path),
        max_context_tokens=_max_context(cfg),
    )


def _max_context(cfg: RunConfig) -> int:
    """rollout.max_context_tokens, else what the model's config says, else what the data's limits add up to."""
    if cfg.rollout.max_context_tokens is not None:
        return cfg.rollout.max_context_tokens
    facts = Path(cfg.model.path) / "config.json"
    known = json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {}
    known = known.get("text_config", known)
    return known.get("max_position_embeddings") or cfg.data.max_prompt_tokens + cfg.rollout.sampling.max_new_tokens


async def _evaluate(cfg: RunConfig) -> None:
    task = await asyncio.to_thread(_load_task, cfg, False)
    if not task.eval_prompts:
        raise MeshrlError("meshrl eval needs data.eval_path; set it to a JSONL file of held-out rows")
    ranks = cfg.cluster.num_rollout_ranks or cfg.cluster.num_train_ranks
    async with (
        _grading(cfg) as scorer,
        launched(cfg.model, cfg.train, cfg.rollout, cfg.cluster, num_train_ranks=0, num_rollout_ranks=ranks) as groups,
    ):
        assert groups.rollouts is not None
        await groups.rollouts.trust_loaded_weights()
        _, metrics = await evaluate_prompts(cfg, task, groups.rollouts, scorer, min_version=0)
    merged = merge(metrics)
    values, names = divide(merged), units(merged)
    for name, value in values.items():
        print(f"{name:<28} {value:.4g} {names[name]}")


async def _sft(loaded: Loaded[SftRunConfig], cfg: SftRunConfig) -> None:
    folder = _new_folder(loaded, cfg.run.folder, cfg.run.name)
    terminal = TerminalSink(cfg.sft.num_steps)
    jsonl = JsonlSink(folder / "metrics.jsonl")
    sinks: tuple[Sink, ...] = (jsonl, terminal)

    def load() -> tuple[SftSource, int]:
        tokenizer = load_tokenizer(cfg.model.path)
        rows, left_out = load_sft_rows(cfg.sft.path, cfg.sft, tokenizer, stop_token_ids(tokenizer, cfg.model.path))
        return SftSource(rows, cfg.run.seed, cfg.sft.shuffle), left_out

    def report(step: int, metrics: Any) -> dict[str, float]:
        merged = merge(metrics)
        values = divide(merged)
        for sink in sinks:
            sink.write(step, values, units(merged))
        return values

    loading = asyncio.create_task(asyncio.to_thread(load))
    with closing(terminal), closing(jsonl):
        async with launched(
            cfg.model, cfg.train, None, cfg.cluster, num_train_ranks=cfg.cluster.num_train_ranks, num_rollout_ranks=0
        ) as groups:
            assert groups.trainer is not None
            source, left_out = await loading
            if left_out:
                terminal.note(f"left out {left_out} rows over {cfg.sft.max_row_tokens} tokens")
            await sft_loop(cfg, groups.trainer, source, report)
            path = model_folder(folder, cfg.sft.num_steps)
            await export_to(groups.trainer, path, cfg.model.path)
        terminal.note(f"wrote {path}")


def _new_folder(loaded: Loaded[Any], parent: str, name: str) -> Path:
    """Make runs/NAME with the resolved config in it. Raises: MeshrlError when a run of that name is there."""
    if name == "auto":
        name = f"{loaded.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(parent) / name
    if (folder / "metrics.jsonl").exists():
        raise MeshrlError(f"{folder} already holds a run; choose another run.name, or remove that folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    return folder


def _ranks(cfg: RunConfig) -> str:
    where = "colocated samplers" if not cfg.cluster.num_rollout_ranks else f"{cfg.cluster.num_rollout_ranks} samplers"
    return f"{cfg.cluster.num_train_ranks} train ranks, {where}, executor {cfg.cluster.executor}"


def _write_result(job: Job, wall_s: float) -> None:
    """result.json and reward.png: the run in a few numbers and one picture."""
    rss = next(m.sum for m in memory_metrics() if m.name == "memory/rss_bytes")
    result = {
        "steps": job.step,
        "wall_s": round(wall_s, 2),
        "evals": [{"step": step, "mean_at_k": value} for step, value in job.evals],
        "reward_curve": job.rewards,
        "final_rss_bytes": int(rss),
        "model": str(model_folder(job.folder, job.step)),
    }
    (job.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    save_curve(job.folder / "reward.png", list(range(1, job.step + 1)), job.rewards, job.evals)


LOOPS = {"colocated": colocated}
