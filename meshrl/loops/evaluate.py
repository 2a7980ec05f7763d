"""Evaluation on held-out prompts: mean@k and pass@k of loop.eval_term, and the mean of every reward term. An attempt
that failed has the lowest score, an attempt to which a term does not apply has none."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from textwrap import shorten
from typing import Any

import numpy as np

from meshrl.agent.loop import Task
from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.config.kinds import REWARDS
from meshrl.config.loop import WEIGHTED_SUM
from meshrl.config.reward import has_passed
from meshrl.config.run import RunConfig
from meshrl.core.errors import DataError, Failure, RewardError
from meshrl.core.lookup import code_of
from meshrl.core.types import Metric, Prompt, Trajectory
from meshrl.loops.collect import check_failures, collect
from meshrl.loops.job import Job
from meshrl.reward.score import Scorer, example

MAX_VALUES, MAX_VALUE = 20, 40  # of data.eval_by: their number, and characters of one
OTHERS = "others"  # the name of all further values together
MIN_ANSWERS, CONSTANT = 20, 0.9  # constant_answer: so many answers, and this share of them


def eval_metrics(trajectories: Sequence[Trajectory], cfg: RunConfig) -> list[Metric]:
    """mean@k: mean of the scores of loop.eval_term. standard_error: of mean@k. pass@k: fraction of prompts with an
    attempt that did not fail and whose score is at least cfg.eval_pass_score. eval/reward/*: means over all attempts,
    named as in training.

    An attempt that failed, or whose grading failed, has the lowest score of all, at most 0, and is counted: failures
    must not improve the score. An attempt to which the term does not apply is left out, and counted.
    """
    groups: dict[str, list[float]] = {}
    passed: set[str] = set()
    scores = scores_by(cfg.eval_term, trajectories)
    for t, score in zip(trajectories, scores, strict=True):
        if score is not None:
            groups.setdefault(t.group_id, []).append(score)
        if not _has_failed(t, cfg.eval_term) and has_passed(score, t.rewards, cfg.eval_pass_score):
            passed.add(t.group_id)
    rows = [np.array(of_group) for of_group in groups.values()]
    num_failed = float(sum(_has_failed(t, cfg.eval_term) for t in trajectories))
    lengths = [sum(len(turn.output_ids) for turn in t.turns) for t in trajectories]
    terms = [_mean(f"eval/reward/term/{term}", scores_by(term, trajectories)) for term in cfg.reward.terms]
    answers = Counter(map(_answer, (t for t in trajectories if t.turns)))
    most_frequent = float(max(answers.values(), default=0))
    num_abstained = scores.count(None)
    abstained = Metric(name="eval/num_abstained", sum=float(num_abstained), reduce="sum", unit="attempts")
    return [
        Metric(name="eval/mean_at_k", sum=float(sum(row.mean() for row in rows)), weight=len(rows), unit="score"),
        Metric(name="eval/standard_error", sum=standard_error([r.mean() for r in rows]), reduce="max", unit="score"),
        Metric(name="eval/score_min", sum=min(map(min, rows), default=math.nan), reduce="min", unit="score"),
        Metric(name="eval/score_max", sum=max(map(max, rows), default=math.nan), reduce="max", unit="score"),
        Metric(name="eval/pass_at_k", sum=float(len(passed)), weight=len(rows), unit="fraction"),
        _mean("eval/reward/mean", scores_by(WEIGHTED_SUM, trajectories)),
        *terms,
        Metric(name="eval/length_mean_tokens", sum=float(sum(lengths)), weight=len(lengths), unit="tokens"),
        Metric(name="eval/num_prompts", sum=float(len(rows)), reduce="sum", unit="prompts"),
        Metric(name="eval/num_failed", sum=num_failed, reduce="sum", unit="attempts"),
        Metric(name="eval/most_frequent_fraction", sum=most_frequent, weight=answers.total(), unit="fraction"),
        Metric(name="eval/distinct_answers", sum=float(len(answers)), reduce="sum", unit="answers"),
        *([abstained] if num_abstained else ()),
        *_by_column(cfg, {t.group_id: t.prompt for t in trajectories}, groups),
    ]


def _by_column(cfg: RunConfig, prompts: dict[str, Prompt], groups: dict[str, list[float]]) -> Iterator[Metric]:
    """mean@k of the prompts with each value of data.eval_by: of the most frequent ones, and of all others together; or
    of each of data.eval_sets."""
    if (column := cfg.data.eval_by) is None and not cfg.data.eval_sets:
        return
    by, names = dict[str, list[float]](), {"": OTHERS}
    for group, scores in groups.items():
        prompt = prompts[group]
        known: dict[str | None, Any] = {cfg.data.answer: prompt.answer, None: _set_of(cfg, prompt)}
        value = known[column] if column in known else prompt.meta.get(column or "")
        by.setdefault(json.dumps(value, default=str, ensure_ascii=False), []).append(float(np.mean(scores)))
    for value in sorted(by):  # different values have different names
        short = re.sub(r"[^\w.+-]+", "_", value.strip('"'))[:MAX_VALUE] or "empty"
        numbered = (f"{short}.{number}" for number in itertools.count(2))
        names[value] = next(each for each in itertools.chain([short], numbered) if each not in names.values())
    for i, (value, means) in enumerate(sorted(by.items(), key=lambda item: -len(item[1]))):
        name = f"eval/by/{names[value] if i < MAX_VALUES else OTHERS}/mean_at_k"
        yield Metric(name=name, sum=sum(means), weight=len(means), unit="score")


def _answer(trajectory: Trajectory) -> str:
    """The sampled text, or the ids where an agent left no text."""
    try:
        return trajectory.text.strip()
    except DataError:
        return str([turn.output_ids.tolist() for turn in trajectory.turns])


def constant_answer(trajectories: Sequence[Trajectory]) -> str | None:
    """A note if nearly all of many answers are the same text, while their rows expect different ones."""
    answers = Counter(map(_answer, (t for t in trajectories if t.turns)))
    expected = {json.dumps(t.prompt.answer, default=str) for t in trajectories}
    text, count = max(answers.items(), key=lambda item: item[1], default=("", 0))
    if answers.total() < MIN_ANSWERS or count < CONSTANT * answers.total() or len(expected) == 1:
        return None
    return (
        f"{count} of {answers.total()} held-out answers are the same, {shorten(text, 80)!r}, while the rows expect "
        f"{len(expected)} different ones: the score is that of a constant answer (eval/most_frequent_fraction). More "
        "steps of `meshrl sft`, or rows with equally many of each answer, help (docs/sft.md)"
    )


def standard_error(means: Sequence[float]) -> float:
    """Of the mean score of prompts, from the mean score of each. Two more prompts count, one with the lowest and one
    with the highest score of [0, 1] and of all prompts, so that it is not 0 when all prompts have the same score.

    Source: Agresti and Caffo, The American Statistician 54 (2000), for scores of 0 and 1. They also multiply the
    difference of two means by n / (n + 2), for n prompts; here the error is divided by it.
    """
    if not means:
        return math.nan
    padded = [*means, min(0.0, *means), max(1.0, *means)]
    return float(np.std(padded) * len(padded) ** 0.5 / len(means))


def _mean(name: str, scores: Sequence[float | None]) -> Metric:
    values = [score for score in scores if score is not None]
    return Metric(name=name, sum=sum(values), weight=len(values))


def scores_by(term: str, trajectories: Sequence[Trajectory]) -> list[float | None]:
    """The score of each attempt by a term, or by weighted_sum: None if it does not apply, and if the attempt or its
    grading failed the lowest score of all, at most 0."""
    found = [t.reward if term == WEIGHTED_SUM else t.rewards.get(term) for t in trajectories]
    lowest = min([0.0, *(float(value) for value in found if isinstance(value, (int, float)))])
    return [
        lowest if _has_failed(t, term) else float(value) if isinstance(value, (int, float)) else None
        for t, value in zip(trajectories, found, strict=True)
    ]


def _has_failed(trajectory: Trajectory, term: str) -> bool:
    """Whether the attempt, or its grading by this term or by one of the weighted sum, has failed."""
    if term == WEIGHTED_SUM:
        return trajectory.reward is None and not trajectory.has_abstained
    return trajectory.status == "failed" or isinstance(trajectory.rewards.get(term), Failure)


def check_scores(cfg: RunConfig, trajectories: Sequence[Trajectory]) -> None:
    """Raises: RewardError for an evaluation that is no score: its term does not apply to any attempt, or has failed on
    a larger share than reward.max_failure_fraction. (check_failures counts the failures of the weighted sum.)"""
    term, total, allowed = cfg.eval_term, len(trajectories), cfg.reward.max_failure_fraction
    failures = [(t, term, r) for t in trajectories if isinstance(r := t.rewards.get(term), Failure)]
    if len(failures) > allowed * total:
        raise RewardError(
            f"the evaluation has no score: loop.eval_term = {term} failed on {len(failures)} of {total} attempts; "
            f"reward.max_failure_fraction = {allowed:g} allows fewer. The first: {example(*failures[0])}"
        )
    if total and scores_by(term, trajectories).count(None) == total:
        raise RewardError(
            f"the evaluation has no score: the reward function of loop.eval_term = {term} returned None for all of "
            f"{total} attempts, so it applies to none of them. Let it return a number, or name another term"
        )


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
    trajectories = list[Trajectory]()

    async def ended(prompt: Prompt, trajectory: Trajectory) -> None:
        group = groups.setdefault(id(prompt), [])
        group.append(trajectory)
        if len(group) == own.loop.eval_samples:
            group.sort(key=lambda t: t.index)
            await scorer.score(group)
            scored(group)

    for name, prompts in eval_sets(cfg, task.eval_prompts).items():
        own = cfg.of_eval_set(name)
        trajectories += await collect(own, task, rollouts, prompts, "eval", min_version, ended)
    check_failures(cfg, scorer, trajectories)
    check_scores(cfg, trajectories)
    return trajectories, eval_metrics(trajectories, cfg)


def eval_sets(cfg: RunConfig, prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each of data.eval_sets; without that key all under one name."""
    return {name: [*of_set] for name, of_set in itertools.groupby(prompts, partial(_set_of, cfg))}


def _set_of(cfg: RunConfig, prompt: Prompt) -> str:
    return prompt.id.partition("/")[0] if cfg.data.eval_sets else ""


def evaluation_identity(cfg: RunConfig, task: Task, scorer: Scorer) -> dict[str, str]:
    """What decides a score except the model: only scores of evaluations with equal identities are compared.

    term: what scores. The others are digests: rows of the set of held-out prompts with their answers and other columns;
    graders of the terms that the score depends on (kind, args, weight in a sum, code) and of the score that passes;
    sampling of k, the parameters, stop ids, the limit of the context and the agent; template of the chat template, its
    variables, the agent's tools and the column of the rows' tools. The names of files, the order of rows and terms, and
    other terms don't count.
    """

    def digest(*parts: Any) -> str:
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]

    is_sum, kwargs = cfg.eval_term == WEIGHTED_SUM, cfg.data.chat_template_kwargs
    used = {n: t for n, t in cfg.reward.terms.items() if n == cfg.eval_term or (is_sum and t.weight)}
    args = {
        name: {k: v for k, v in t.args.items() if t.kind not in REWARDS or k not in REWARDS[t.kind].neutral_args}
        for name, t in used.items()
    }
    graders = {
        name: (t.kind, args[name], t.weight if is_sum else 1, scorer.code[name], *(t.envs or ()))
        for name, t in used.items()
    }
    own = [{name: (each.samples, dict(each.sampling))} for name, each in sorted(cfg.data.eval_sets.items())]
    agent = cfg.agent.kind, cfg.agent.args, code_of(cfg.agent.kind)
    limits = sorted(task.stop_token_ids), cfg.rollout.max_context_tokens
    return {
        "term": cfg.eval_term,
        "rows": digest(
            *sorted(
                json.dumps([p.messages, p.answer, p.env, p.meta, *(m.digest for m in p.media.values())], default=str)
                for p in task.eval_prompts
            )
        ),
        "graders": digest(graders, cfg.eval_pass_score),
        "sampling": digest(cfg.loop.eval_samples, cfg.eval_sampling.model_dump(), limits, agent, *own),
        "template": digest(task.tokenizer.chat_template, kwargs, task.agent.tools, cfg.data.tools),
    }


def evaluation_text(cfg: RunConfig) -> str:
    """How an evaluation samples, and by which of several scores it judges: greedy; 4 samples each, scored by answer."""
    if cfg.data.eval_sets:
        return "; ".join(f"{name}: {evaluation_text(cfg.of_eval_set(name))}" for name in cfg.data.eval_sets)
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
        await job.keeper.keep_best(*job.evals[-1])  # the run may have ended before the model was written
    if done or not due or not job.task.eval_prompts:
        return
    ended, total = itertools.count(1), len(job.task.eval_prompts)

    def scored(group: list[Trajectory]) -> None:
        run.progress(f"{next(ended)} of {total} prompts")

    with run.spans("eval"):
        of_the_run = job.cfg, job.task, job.rollouts, job.scorer, job.trainer.version
        trajectories, metrics = await evaluate_prompts(*of_the_run, scored)
    with run.spans("log"):
        job.rollout_log.write(job.step, trajectories, name="eval")
        values = run.report(job.step, metrics + run.spans.take("eval"), job.evaluation)
    job.evals.append((job.step, values["eval/mean_at_k"]))
    k, failed = "k" if job.cfg.data.eval_sets else job.cfg.loop.eval_samples, values["eval/num_failed"]
    lowest = f"; {failed:g} attempts failed and have the lowest score" if failed else ""
    run.note(
        f"eval after {job.step} step{'' if job.step == 1 else 's'}: mean@{k} {values['eval/mean_at_k']:.3f}, pass@{k} "
        f"{values['eval/pass_at_k']:.3f} on {len(job.task.eval_prompts)} held-out prompts ({evaluation_text(job.cfg)})"
        + lowest
    )
    if "constant" not in job.noted and (note := constant_answer(trajectories)) is not None:
        job.noted.add("constant")
        run.note(f"step {job.step}: {note}")
    if job.cfg.loop.save_best:
        await job.keeper.keep_best(job.step, values["eval/mean_at_k"])
