"""The inputs of a prediction, measured in a colocated run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from meshrl.agent.flatten import context_lengths
from meshrl.config.run import RunConfig
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Trajectory
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.sinks import MetricsLine
from meshrl.tools.report.folder import read_run, seconds_by_phase
from meshrl.tools.schedule.step_time import Answer, Costs

LEAST_SPREAD = 0.02  # standard deviation of the tokens of steps over their mean; below it no constant is fitted
MOST_UNSURE = 0.25  # standard error of a fitted constant, over the median time; above it, too
FORWARD_SHARE = 1 / 3  # of the time of forward and backward
PROBED_ROWS = 4  # of each sync of stale samples: loops/sync_and_probe.py
FITS = (("train_step_s", "train_token_s"), ("prefill_step_s", "prefill_token_s"), ("decode_step_s", "decode_row_s"))
"""Pairs of a constant and a time for each token or row."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """lengths: the answers of each group. source: where the times come from; notes: what the user should know."""

    costs: Costs
    lengths: list[list[Answer]]
    source: str
    notes: tuple[str, ...] = ()


class _Decoding(NamedTuple):
    """A turn: its decode steps after the first token, from `start` to `end` (seconds since the step's first request),
    and the context tokens that were computed for it before, in prefill_s."""

    start: float
    end: float
    steps: int
    prefill: int
    prefill_s: float


def measured(folder: Path) -> Inputs:
    """Fit the costs to a colocated run, and take its lengths."""
    run = read_run(folder)
    kind, ranks = run.setting("loop.kind") or "colocated", int(run.setting("cluster.num_train_ranks") or 1)
    if kind != "colocated":
        raise MeshrlError(f"{folder} is a run with loop.kind={kind}; give a run with loop.kind=colocated")
    steps: list[_Step] = []
    for line in run.lines:
        path = folder / "rollouts" / f"step_{line.step:06d}.jsonl"
        if "time/train_s" in line.metrics and path.exists():
            steps.append((line, [logged.trajectory for logged in read_rollouts(path)]))
    if len(steps) < 4:
        raise MeshrlError(
            f"{folder} has {len(steps)} finished steps with files in rollouts/ (monitor.rollout_log_every_steps); 4 or "
            "more are needed to fit times to them"
        )
    groups = [group for _, trajectories in steps for group in _groups(trajectories)]
    costs, notes = _costs(folder, run.lines, steps[1:], ranks)  # the first step is slower
    truncated = float(np.mean([t.status == "truncated" for _, trajectories in steps for t in trajectories]))
    if truncated > 0.05:
        notes.append(f"{truncated:.0%} of the run's answers were truncated; with a higher limit they would be longer")
    # The proof after a sync: a forward pass of some short rows in the trainer. Without tokens, it costs as much as that
    # of a sampler.
    lengths = sorted(answer.trained for group in groups for answer in group)
    probe_s = FORWARD_SHARE * costs.train_token_s * PROBED_ROWS * lengths[len(lengths) // 20] / ranks
    costs = replace(costs, probe_s=costs.prefill_step_s + probe_s)
    source = f"measured in {len(steps) - 1} steps of {folder} ({ranks} train ranks)"
    return Inputs(costs, groups, source, (*notes, *run.state.problems))


_Step = tuple[MetricsLine, list[Trajectory]]


def _costs(folder: Path, lines: Sequence[MetricsLine], steps: Sequence[_Step], ranks: int) -> tuple[Costs, list[str]]:
    """The costs, and notes on those that the run can't separate."""
    steps = [(line, trajectories) for line, trajectories in steps if any(t.turns for t in trajectories)]
    warm, engines = [line for line, _ in steps], [_decodings(trajectories) for _, trajectories in steps]
    turns = [of_engine for step in engines for of_engine in step]
    if not sum(d.end > d.start for of_engine in turns for d in of_engine):
        raise MeshrlError(f"the turns in {folder}/rollouts have no decode times; give another run")
    fits = [_fit([m.metrics["train/num_tokens"] / ranks for m in warm], [m.metrics["time/train_s"] for m in warm])]
    decode = _fit_decoding(turns)
    first = []  # (context tokens, seconds) of the prefill in an engine's first step
    for of_engine in turns:
        earliest = min(turn.start for turn in of_engine)
        joined = [turn for turn in of_engine if turn.start - turn.prefill_s <= earliest]
        seconds = median(turn.prefill_s for turn in joined) - decode[0] - decode[1] * len(joined)
        first.append((sum(turn.prefill for turn in joined), max(0.0, seconds)))
    fits += [_fit([tokens for tokens, _ in first], [seconds for _, seconds in first]), decode]
    # Computing a context token is the first third of training on it. The other time of a prefill is the same for all.
    values = {key: value for keys, fit in zip(FITS, fits) for key, value in zip(keys, fit)}
    token_s = values["prefill_token_s"] = min(values["prefill_token_s"], values["train_token_s"] * FORWARD_SHARE)
    values["prefill_step_s"] = max(0.0, median(seconds - token_s * tokens for tokens, seconds in first))
    unknown = [" from ".join(keys) for keys, (*_, is_known) in zip(FITS, fits) if not is_known]
    notes = [
        f"the steps of this run are too few or too alike to separate {', '.join(unknown)}: the second of a pair gets "
        "all of its time (in a prefill at most a third of training). A longer run gives both"
    ] * bool(unknown)
    between = [  # seconds of a step that no phase has
        line.time - before.time - sum(seconds_by_phase(line).values())
        for before, line in pairwise(lines)
        if line in warm
    ]
    requests, rewards = [], []
    for (line, trajectories), step in zip(steps, engines):
        end = max(turn.end for of_engine in step for turn in of_engine)
        requests.append(max(0.0, line.metrics["time/rollout_s"] - end) / len(trajectories))
        rewards.append(line.metrics.get("time/reward_s", 0.0) / len({t.group_id for t in trajectories}))
    costs = Costs(
        **values,
        request_s=median(requests),
        reward_group_s=median(rewards),
        sync_s=median(line.metrics.get("time/sync_s", 0.0) for line in warm),
        step_s=max(0.0, median(between)),
    )
    return costs, notes


def _groups(trajectories: Sequence[Trajectory]) -> list[list[Answer]]:
    groups: dict[str, list[Answer]] = {}
    for trajectory in (t for t in trajectories if t.turns):
        turns, contexts = trajectory.turns, context_lengths(trajectory.turns)
        lengths = tuple(
            (max(0, c - turn.times.cached_tokens), len(turn.output_ids)) for turn, c in zip(turns, contexts)
        )
        parents = {turn.parent for turn in turns}
        trained = sum(contexts[i] + len(turn.output_ids) for i, turn in enumerate(turns) if i not in parents)
        groups.setdefault(trajectory.group_id, []).append(Answer(lengths, trained))
    return list(groups.values())


def _decodings(trajectories: Sequence[Trajectory]) -> list[list[_Decoding]]:
    """The turns of a step in each engine. All trajectories start together, and a turn when the one before it ended."""
    by_engine: dict[str, list[_Decoding]] = defaultdict(list)
    for trajectory in trajectories:
        now = 0.0
        for turn, context in zip(trajectory.turns, context_lengths(trajectory.turns)):
            times, steps = turn.times, len(turn.output_ids) - 1
            start = now + times.queue_s + times.prefill_s
            now = start + times.decode_s
            prefill = max(0, context - times.cached_tokens)
            by_engine[turn.engine_id].append(_Decoding(start, now, steps, prefill, times.prefill_s))
    return list(by_engine.values())


def _fit_decoding(engines: Sequence[Sequence[_Decoding]]) -> tuple[float, float, bool]:
    """The seconds of a decode step, and of each of its rows."""
    used = [[turn for turn in turns if turn.steps > 0 and turn.end > turn.start] for turns in engines]
    seconds = [(turn.end - turn.start) / turn.steps for turns in used for turn in turns]
    fit = (1.0, 0.0, False)
    for _ in range(6):  # the mean number of rows of a turn's steps depends on how long each of its steps was
        fit = _fit([rows for turns in used if turns for rows in _mean_rows(turns, *fit[:2])], seconds, len(engines))
    return fit


def _mean_rows(turns: Sequence[_Decoding], step_s: float, row_s: float) -> Iterator[float]:
    """For each turn, the mean number of running rows over its decode steps."""
    starts, ends = np.array([turn.start for turn in turns]), np.array([turn.end for turn in turns])
    edges = np.unique(np.concatenate([starts, ends]))
    rows = np.searchsorted(np.sort(starts), edges, "right") - np.searchsorted(np.sort(ends), edges, "right")
    steps = np.diff(edges, append=edges[-1]) / (step_s + row_s * np.maximum(rows, 1))
    before, weighted = (np.concatenate([[0.0], np.cumsum(values)]) for values in (steps, steps * rows))
    first, last = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
    yield from ((weighted[last] - weighted[first]) / (before[last] - before[first])).tolist()


def _fit(units: Sequence[float], seconds: Sequence[float], count: int | None = None) -> tuple[float, float, bool]:
    """(constant, slope, True), medians over pairs of values, so that single slow steps count little. If the values
    can't separate the two, (0, all of the time, False). count: of independent values; None: all."""
    x, y = np.array(units, float), np.array(seconds, float)
    mean, spread = float(x.mean()), float(x.std())
    some = np.argsort(x)[:: max(1, len(x) // 400)]
    dx, dy = (np.subtract.outer(values[some], values[some]) for values in (x, y))
    far = dx >= max(spread, 1e-300)
    slope = max(0.0, float(np.median(dy[far] / dx[far]))) if far.any() else 0.0
    constant = float(np.median(y - slope * x))
    if constant < 0:
        constant, slope = 0.0, float(np.median(y / np.maximum(x, 1e-300)))
    noise = 1.4826 * float(np.median(np.abs(y - constant - slope * x)))  # a standard deviation
    error = noise * mean / max(spread * math.sqrt(count or len(x)), 1e-300)  # of the constant
    if spread >= LEAST_SPREAD * mean and error <= MOST_UNSURE * float(np.median(y)):
        return constant, slope, True
    return (0.0, float(np.median(y / np.maximum(x, 1e-300))), False) if mean else (constant, 0.0, False)


def resized(lengths: Sequence[Sequence[Answer]], config: RunConfig) -> list[list[Answer]]:
    """Groups of loop.samples_per_prompt answers, each turn cut off at rollout.sampling.max_new_tokens."""
    size, most = config.loop.samples_per_prompt, config.rollout.sampling.max_new_tokens

    def cut(turns: tuple[tuple[int, int], ...], trained: int) -> Answer:
        over = sum(max(0, output - most) for _, output in turns)
        return Answer(tuple((prefill, min(output, most)) for prefill, output in turns), trained - over)

    return [[cut(*group[i % len(group)]) for i in range(size)] for group in lengths]
