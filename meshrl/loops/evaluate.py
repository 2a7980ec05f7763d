"""Evaluation on held-out prompts: mean@k and pass@k of loop.eval_term, and the mean of every reward term."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshrl.agent.loop import Task
from meshrl.cluster.groups import RolloutGroup
from meshrl.config.loop import WEIGHTED_SUM
from meshrl.config.run import RunConfig
from meshrl.core.lookup import code_of
from meshrl.core.types import Metric, Prompt, Trajectory
from meshrl.loops.collect import check_failures, collect
from meshrl.loops.job import Job
from meshrl.reward.score import Scorer


def eval_metrics(trajectories: Sequence[Trajectory], cfg: RunConfig) -> list[Metric]:
    """mean@k: mean of the scores of loop.eval_term. standard_error: of mean@k. pass@k: fraction of prompts with an
    attempt whose score is at least cfg.eval_pass_score. eval/reward/*: means over all attempts, named as in training.

    A failed attempt scores 0 here and is counted: failures must not improve the score.
    """
    groups: dict[str, list[float]] = {}
    for t in trajectories:
        groups.setdefault(t.group_id, []).append(score_of(t, cfg.eval_term))
    rows, count = [np.array(scores) for scores in groups.values()], len(trajectories)
    passed = float(sum(row.max() >= cfg.eval_pass_score for row in rows))
    num_failed = float(sum(t.reward is None for t in trajectories))
    lengths = [sum(len(turn.output_ids) for turn in t.turns) for t in trajectories]
    terms = [
        Metric(name=f"eval/reward/term/{term}", sum=sum(score_of(t, term) for t in trajectories), weight=count)
        for term in cfg.reward.terms
    ]
    return [
        Metric(name="eval/mean_at_k", sum=float(sum(row.mean() for row in rows)), weight=len(rows), unit="score"),
        Metric(name="eval/standard_error", sum=standard_error([r.mean() for r in rows]), reduce="max", unit="score"),
        Metric(name="eval/score_min", sum=min(map(min, rows)), reduce="min", unit="score"),
        Metric(name="eval/score_max", sum=max(map(max, rows)), reduce="max", unit="score"),
        Metric(name="eval/pass_at_k", sum=passed, weight=len(rows), unit="fraction"),
        Metric(name="eval/reward/mean", sum=sum(score_of(t, WEIGHTED_SUM) for t in trajectories), weight=count),
        *terms,
        Metric(name="eval/length_mean_tokens", sum=float(sum(lengths)), weight=len(lengths), unit="tokens"),
        Metric(name="eval/num_prompts", sum=float(len(rows)), reduce="sum", unit="prompts"),
        Metric(name="eval/num_failed", sum=num_failed, reduce="sum", unit="attempts"),
    ]


def standard_error(means: Sequence[float]) -> float:
    """Of the mean score of prompts, from the mean score of each. Two more prompts count, one with the lowest and one
    with the highest score of [0, 1] and of all prompts, so that it is not 0 when all prompts have the same score.

    Source: Agresti and Caffo, The American Statistician 54 (2000), for scores of 0 and 1. They also multiply the
    difference of two means by n / (n + 2), for n prompts; here the error is divided by it.
    """
    padded = [*means, min(0.0, *means), max(1.0, *means)]
    return float(np.std(padded) * len(padded) ** 0.5 / len(means))


def score_of(trajectory: Trajectory, term: str) -> float:
    """The score of a term, or of weighted_sum; 0 if the attempt or its grading failed."""
    value = trajectory.rewards.get(term, trajectory.reward if term == WEIGHTED_SUM else None)
    return float(value) if isinstance(value, (int, float)) else 0.0


async def evaluate_prompts(
    cfg: RunConfig,
    task: Task,
    rollouts: RolloutGroup,
    scorer: Scorer,
    min_version: int,
    scored: Callable[[list[Trajectory]], None] = lambda _: None,
) -> tuple[list[Trajectory], list[Metric]]:
    """Answer and score every held-out prompt with the samplers' current weights. scored: called with the attempts at
    each prompt as soon as they are scored, while others are sampled."""
    groups: dict[int, list[Trajectory]] = {}

    async def ended(prompt: Prompt, trajectory: Trajectory) -> None:
        group = groups.setdefault(id(prompt), [])
        group.append(trajectory)
        if len(group) == cfg.loop.eval_samples:
            group.sort(key=lambda t: t.index)
            await scorer.score(group)
            scored(group)

    trajectories = await collect(cfg, task, rollouts, task.eval_prompts, "eval", min_version, ended)
    check_failures(cfg, scorer, trajectories)
    return trajectories, eval_metrics(trajectories, cfg)


def evaluation_identity(cfg: RunConfig, task: Task, scorer: Scorer) -> dict[str, str]:
    """What decides a score except the model: only scores of evaluations with equal identities are compared.

    term: what scores. The others are digests: rows of the set of held-out prompts with their answers and other columns;
    graders of the terms that the score depends on (kind, args, weight in a sum, code) and of the score that passes;
    sampling of k, the parameters, stop ids, the limit of the context and the agent; template of the chat template, its
    variables and the agent's tools. The names of files, the order of rows and terms, and other terms don't count.
    """

    def digest(*parts: Any) -> str:
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]

    is_sum, kwargs = cfg.eval_term == WEIGHTED_SUM, cfg.data.chat_template_kwargs
    used = {n: t for n, t in cfg.reward.terms.items() if n == cfg.eval_term or (is_sum and t.weight)}
    graders = {name: (t.kind, t.args, t.weight if is_sum else 1, scorer.code[name]) for name, t in used.items()}
    agent = cfg.agent.kind, cfg.agent.args, code_of(cfg.agent.kind)
    limits = sorted(task.stop_token_ids), cfg.rollout.max_context_tokens
    return {
        "term": cfg.eval_term,
        "rows": digest(
            *sorted(json.dumps([p.messages, p.answer, p.env, p.meta], default=str) for p in task.eval_prompts)
        ),
        "graders": digest(graders, cfg.eval_pass_score),
        "sampling": digest(cfg.loop.eval_samples, cfg.eval_sampling.model_dump(), limits, agent),
        "template": digest(task.tokenizer.chat_template, kwargs, task.agent.tools),
    }


def evaluation_text(cfg: RunConfig) -> str:
    """How an evaluation samples, and by which of several scores it judges: greedy; 4 samples each, scored by answer."""
    k, temperature = cfg.loop.eval_samples, cfg.eval_sampling.temperature
    samples = "1 sample" if k == 1 else f"{k} samples"
    at = "" if temperature == cfg.rollout.sampling.temperature else f" at temperature {temperature:g}"
    by = f", scored by {cfg.eval_term}" if len(cfg.reward.terms) > 1 else ""
    return ("greedy" if temperature == 0 else f"{samples} each{at}") + by


async def evaluate_if_due(job: Job) -> None:
    """Evaluate before the first step, after the last, every loop.eval_every_steps, and where a run continues with
    evaluations of another identity, each once, if there are held-out prompts. The metrics go to the sinks under the
    last finished step, the answers to a file. With loop.save_best the model is saved if it is the best so far."""
    every, done = job.cfg.loop.eval_every_steps, bool(job.evals) and job.evals[-1][0] == job.step
    due = job.step == job.first_eval or job.is_over or (every and job.step % every == 0)
    run = job.run
    if done and job.cfg.loop.save_best:
        await run.keep_best(*job.evals[-1])  # the run may have ended before the model was written
    if done or not due or not job.task.eval_prompts:
        return
    ended, total = itertools.count(1), len(job.task.eval_prompts)

    def scored(group: list[Trajectory]) -> None:
        run.progress(f"{next(ended)} of {total} prompts")

    with run.spans("eval"):
        of_the_run = job.cfg, job.task, job.rollouts, job.scorer, job.trainer.version
        trajectories, metrics = await evaluate_prompts(*of_the_run, scored)
    job.rollout_log.write(job.step, trajectories, name="eval")
    values = run.report(job.step, metrics + run.spans.take("eval"))
    job.evals.append((job.step, values["eval/mean_at_k"]))
    k = job.cfg.loop.eval_samples
    run.note(
        f"eval after {job.step} step{'' if job.step == 1 else 's'}: mean@{k} {values['eval/mean_at_k']:.3f}, pass@{k} "
        f"{values['eval/pass_at_k']:.3f} on {len(job.task.eval_prompts)} held-out prompts ({evaluation_text(job.cfg)})"
    )
    if job.cfg.loop.save_best:
        await run.keep_best(job.step, values["eval/mean_at_k"])
