"""The inputs of the simulation: measured in a colocated run, or assumed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from meshrl.agent.tree import path_ids
from meshrl.config.run import RunConfig
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.types import Trajectory, Turn
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.sinks import MetricsLine
from meshrl.tools.report.folder import read_run, seconds_by_phase
from meshrl.tools.schedule.setup import AnswerLengths, Costs, TurnLengths
from meshrl.tools.schedule.simulate import PROBED_ROWS

LEAST_SPREAD = 0.02  # standard deviation of the tokens of steps over their mean; below it no constant is fitted
MOST_UNSURE = 0.25  # standard error of a fitted constant, over the median time; above it, too
FORWARD_SHARE = 1 / 3  # of the time of forward and backward
NUM_ASSUMED_GROUPS = 512
LENGTHS = {"answer_tokens": 0.0, "answer_sigma": 0.8, "prompt_tokens": 200.0}  # with their defaults
REQUIRED = ("decode_step_s", "train_token_s", "answer_tokens")  # without a run


@dataclass(frozen=True, slots=True)
class Inputs:
    """lengths: the answers of each group. source: where the times come from; notes: what the user should know."""

    costs: Costs
    lengths: list[list[AnswerLengths]]
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Decoding:
    """A turn in its engine: its decode steps after the first token, from `start` to `end` (seconds since the step's
    first request), and the context tokens that were computed for it before, in prefill_s."""

    start: float
    end: float
    steps: int
    prefill: int
    prefill_s: float


# ---- measured


def measured(folder: Path) -> Inputs:
    """Fit the costs to a colocated run, and take its lengths. Raises: MeshrlError, DataError."""
    run = read_run(folder)
    kind, ranks = run.setting("loop.kind") or "colocated", int(run.setting("cluster.num_train_ranks") or 1)
    if kind != "colocated":
        raise MeshrlError(f"{folder} is a run with loop.kind={kind}; give a run with loop.kind=colocated")
    steps: list[_Step] = []
    for line in run.lines:
        path = folder / "rollouts" / f"step_{line.step:06d}.jsonl"
        if "time/train_s" in line.metrics and path.exists():
            steps.append((line, [logged.trajectory for logged in read_rollouts(path)]))
    if not steps:
        raise MeshrlError(f"{folder} has no finished step with a file in rollouts/; give a run with some steps")
    if len(steps) < 4:
        raise MeshrlError(
            f"{folder} has {len(steps)} finished steps with files in rollouts/ (monitor.rollout_log_every_steps); 4 or "
            "more are needed to fit times to them"
        )
    groups = [group for _, trajectories in steps for group in _groups(trajectories)]
    costs, unknown = _costs(folder, run.lines, steps[1:], ranks)  # the first step is slower
    truncated = float(np.mean([t.status == "truncated" for _, trajectories in steps for t in trajectories]))
    # The proof after a sync: a forward pass of some short rows in the trainer. Without tokens, it costs as much as that
    # of a sampler.
    lengths = sorted(answer.trained for group in groups for answer in group)
    tokens = PROBED_ROWS * lengths[len(lengths) // 20]
    probe_s = costs.prefill_step_s + FORWARD_SHARE * costs.train_token_s * tokens / ranks
    return Inputs(
        replace(costs, probe_s=probe_s),
        groups,
        f"measured in {len(steps) - 1} steps of {folder} ({ranks} train ranks)",
        unknown
        + (f"{truncated:.0%} of the run's answers were truncated; with a higher limit they would be longer",)
        * (truncated > 0.05)
        + tuple(run.state.problems),
    )


_Step = tuple[MetricsLine, list[Trajectory]]


def _costs(
    folder: Path, lines: Sequence[MetricsLine], steps: Sequence[_Step], ranks: int
) -> tuple[Costs, tuple[str, ...]]:
    """The costs, and notes on those that the run can't separate."""
    steps = [(line, trajectories) for line, trajectories in steps if any(t.turns for t in trajectories)]
    warm = [line for line, _ in steps]
    engines = [_decodings(trajectories) for _, trajectories in steps]
    turns = [of_engine for step in engines for of_engine in step.values()]
    if not sum(d.end > d.start for of_engine in turns for d in of_engine):
        raise MeshrlError(f"the turns in {folder}/rollouts have no decode times; give --assume decode_step_s=SECONDS")
    decode, decode_known = _fit_decoding(turns)
    train, train_known = _constant_and_slope(
        [(1.0, line.metrics["train/num_tokens"] / ranks) for line in warm],
        [line.metrics["time/train_s"] for line in warm],
        len(warm),
    )
    first = []  # (context tokens, seconds) of the prefill in an engine's first step
    for of_engine in turns:
        earliest = min(turn.start for turn in of_engine)
        joined = [turn for turn in of_engine if turn.start - turn.prefill_s <= earliest]
        seconds = median(turn.prefill_s for turn in joined) - decode[0] - decode[1] * len(joined)
        first.append((float(sum(turn.prefill for turn in joined)), max(0.0, seconds)))
    # Computing a context token is the first third of training on it. The other time of a prefill is the same for all.
    columns, prefill_s = [(1.0, tokens) for tokens, _ in first], [seconds for _, seconds in first]
    fitted, prefill_known = _constant_and_slope(columns, prefill_s, len(first))
    token_s = min(fitted[1], train[1] * FORWARD_SHARE)
    between = [  # seconds of a step that no phase has
        line.time - before.time - sum(seconds_by_phase(line).values())
        for before, line in pairwise(lines)
        if line in warm
    ]
    ends = [max(d.end for of_engine in step.values() for d in of_engine) for step in engines]
    fits = {
        "train_step_s and train_token_s": (train_known, "tokens of its steps"),
        "prefill_step_s and prefill_token_s": (prefill_known, "prompt tokens of its steps"),
        "decode_step_s and decode_row_s": (decode_known, "running rows of its decode steps"),
    }
    notes = [
        f"this run can't separate {keys}: the {what} vary too little, so the second one gets the time (of a prefill "
        f"at most a third of training); give a run in which they vary more, or both values by --assume"
        for keys, (known, what) in fits.items()
        if not known
    ]
    costs = Costs(
        decode_step_s=decode[0],
        decode_row_s=decode[1],
        prefill_step_s=max(0.0, median(seconds - token_s * tokens for tokens, seconds in first)),
        prefill_token_s=token_s,
        request_s=median(
            max(0.0, line.metrics["time/rollout_s"] - end) / len(trajectories)
            for end, (line, trajectories) in zip(ends, steps)
        ),
        reward_group_s=median(
            line.metrics.get("time/reward_s", 0.0) / len({t.group_id for t in trajectories})
            for line, trajectories in steps
        ),
        train_step_s=train[0],
        train_token_s=train[1],
        sync_s=median(line.metrics.get("time/sync_s", 0.0) for line in warm),
        step_s=max(0.0, median(between)),
    )
    return costs, tuple(notes)


def _groups(trajectories: Iterable[Trajectory]) -> list[list[AnswerLengths]]:
    groups: dict[str, list[AnswerLengths]] = {}
    for trajectory in trajectories:
        contexts, parents = _contexts(trajectory.turns), {turn.parent for turn in trajectory.turns}
        turns = tuple(
            TurnLengths(max(0, context - turn.times.cached_tokens), context, len(turn.output_ids))
            for turn, context in zip(trajectory.turns, contexts)
        )
        rows = [t.context + t.output for i, t in enumerate(turns) if i not in parents]
        if turns:
            groups.setdefault(trajectory.group_id, []).append(AnswerLengths(turns, sum(rows)))
    return list(groups.values())


def _contexts(turns: Sequence[Turn]) -> list[int]:
    """The tokens of the full context of each turn."""
    return [len(path_ids(turns, turn.parent)) + len(turn.context_ids) for turn in turns]


def _decodings(trajectories: Sequence[Trajectory]) -> dict[str, list[_Decoding]]:
    """The turns of a step by engine. All trajectories start together, and a turn when the one before it has ended."""
    by_engine: dict[str, list[_Decoding]] = defaultdict(list)
    for trajectory in trajectories:
        now = 0.0
        for turn, context in zip(trajectory.turns, _contexts(trajectory.turns)):
            times = turn.times
            start = now + times.queue_s + times.prefill_s
            now = start + times.decode_s
            prefill = max(0, context - times.cached_tokens)
            by_engine[turn.engine_id].append(_Decoding(start, now, len(turn.output_ids) - 1, prefill, times.prefill_s))
    return by_engine


def _fit_decoding(engines: Sequence[Sequence[_Decoding]]) -> tuple[tuple[float, float], bool]:
    """(a, b) of the time a + b * (running rows) of a decode step, and whether the rows vary enough to separate them."""
    fit = (1.0, 0.0)
    for _ in range(6):  # the mean number of rows of a turn's steps depends on how long each of its steps was
        columns: list[tuple[float, float]] = []
        seconds: list[float] = []
        for turns in engines:
            used = [turn for turn in turns if turn.steps > 0 and turn.end > turn.start]
            columns += [(turn.steps, turn.steps * rows) for turn, rows in zip(used, _mean_rows(used, fit))]
            seconds += [turn.end - turn.start for turn in used]
        fit = _least_deviations(columns, seconds)
    return _constant_and_slope(columns, seconds, len(engines))  # the turns of an engine share their noise


def _mean_rows(turns: Sequence[_Decoding], fit: tuple[float, float]) -> Sequence[float]:
    """For each turn, the mean number of running rows over its decode steps."""
    if not turns:
        return ()
    starts, ends = np.array([turn.start for turn in turns]), np.array([turn.end for turn in turns])
    edges = np.unique(np.concatenate([starts, ends]))
    sorted_starts, sorted_ends = np.sort(starts), np.sort(ends)
    rows = np.searchsorted(sorted_starts, edges, "right") - np.searchsorted(sorted_ends, edges, "right")
    steps = np.diff(edges, append=edges[-1]) / (fit[0] + fit[1] * np.maximum(rows, 1))
    before = np.concatenate([[0.0], np.cumsum(steps)])
    weighted = np.concatenate([[0.0], np.cumsum(steps * rows)])
    first, last = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
    mean: list[float] = ((weighted[last] - weighted[first]) / (before[last] - before[first])).tolist()
    return mean


def _constant_and_slope(
    columns: Sequence[tuple[float, float]], values: Sequence[float], count: int
) -> tuple[tuple[float, float], bool]:
    """`_least_deviations`, and whether the data can separate its two columns. If they can't, all is attributed to the
    second one. count: of independent values."""
    first, second = np.array(columns, np.float64).T
    units, each = second / first, np.array(values, np.float64) / first
    fit = _least_deviations(columns, values)
    noise = 1.4826 * float(np.median(np.abs(each - fit[0] - fit[1] * units)))  # a standard deviation
    mean, spread = float(units.mean()), float(units.std())
    error = noise * mean / max(spread * math.sqrt(count), 1e-300)  # of the constant
    if spread >= LEAST_SPREAD * mean and error <= MOST_UNSURE * float(np.median(each)):
        return fit, True
    return (0.0, float(np.median(each / np.maximum(units, 1e-300)))) if mean else (fit[0], 0.0), False


def _least_deviations(columns: Sequence[tuple[float, float]], values: Sequence[float]) -> tuple[float, float]:
    """Coefficients x, y >= 0 of columns * (x, y) = values with the least absolute deviations, so that single slow steps
    count little."""
    matrix, target = np.array(columns, np.float64), np.array(values, np.float64)
    weights, fit = np.ones(len(target)), (0.0, 0.0)
    scale = max(float(np.abs(target).max()), 1e-12)
    for _ in range(20):
        root = np.sqrt(weights)
        weighted, wanted = matrix * root[:, None], target * root
        x, y = np.linalg.lstsq(weighted, wanted, rcond=None)[0].tolist()
        if x < 0 or y < 0:  # the better one of the two columns alone
            alone = [max(0.0, float(column @ wanted) / max(float(column @ column), 1e-300)) for column in weighted.T]
            residuals = [float(np.sum((wanted - column * c) ** 2)) for column, c in zip(weighted.T, alone)]
            x, y = (alone[0], 0.0) if residuals[0] <= residuals[1] else (0.0, alone[1])
        fit = x, y
        weights = 1 / np.maximum(np.abs(target - matrix @ np.array(fit)), 1e-4 * scale)
    return fit


# ---- assumed


def with_assumed(inputs: Inputs | None, texts: Sequence[str], config: RunConfig) -> Inputs:
    """The inputs with assumed values in place of measured ones, or with assumed values only. texts: key=value, several
    separated by commas. Raises: ConfigError."""
    assumed = _parsed(texts)
    if inputs is None and (missing := [key for key in REQUIRED if key not in assumed]):
        raise ConfigError(
            f"there are no times: give --from RUN_FOLDER, or --assume with {', '.join(REQUIRED)} (missing: "
            f"{', '.join(missing)})"
        )
    costs = {key: value for key, value in assumed.items() if key not in LENGTHS}
    if inputs is not None:
        groups = inputs.lengths if assumed.keys().isdisjoint(LENGTHS) else _assumed_lengths(assumed, config)
        source = inputs.source + (f"; assumed: {', '.join(assumed)}" if assumed else "")
        return Inputs(replace(inputs.costs, **costs), groups, source, inputs.notes)
    return Inputs(Costs(**costs), _assumed_lengths(assumed, config), "assumed")


def _parsed(texts: Sequence[str]) -> dict[str, float]:
    allowed = [*(field.name for field in fields(Costs)), *LENGTHS]
    assumed: dict[str, float] = {}
    for text in (part for item in texts for part in item.split(",") if part):
        key, _, value = text.partition("=")
        if key not in allowed:
            raise ConfigError(f"--assume {text}: there is no key {key!r}; keys: {', '.join(allowed)}")
        try:
            assumed[key] = float(value)
        except ValueError:
            assumed[key] = math.nan
        if not 0 <= assumed[key] < math.inf:
            raise ConfigError(f"--assume {text}: {value!r} is not a number of at least 0, such as {key}=0.02")
    if assumed.get("decode_step_s", 1.0) == 0:
        raise ConfigError("--assume decode_step_s=0: a decode step takes some time; give more than 0")
    return assumed


def _assumed_lengths(assumed: dict[str, float], config: RunConfig) -> list[list[AnswerLengths]]:
    """Answers with log-normal lengths, independent of each other, cut off at rollout.sampling.max_new_tokens."""
    if "answer_tokens" not in assumed:
        raise ConfigError("--assume: answer_sigma and prompt_tokens need answer_tokens, the mean length of an answer")
    values = LENGTHS | assumed
    mean, sigma, prompt = values["answer_tokens"], values["answer_sigma"], round(values["prompt_tokens"])
    size, most = config.loop.samples_per_prompt, config.rollout.sampling.max_new_tokens
    drawn = np.random.default_rng(0).standard_normal((NUM_ASSUMED_GROUPS, size))
    tokens = np.clip(np.rint(np.exp(math.log(max(mean, 1.0)) - sigma**2 / 2 + sigma * drawn)), 1, most).astype(int)
    return [
        [AnswerLengths((TurnLengths(prompt * (i == 0), prompt, n),), prompt + n) for i, n in enumerate(group)]
        for group in tokens.tolist()
    ]


def resized(lengths: Sequence[Sequence[AnswerLengths]], config: RunConfig) -> list[list[AnswerLengths]]:
    """Groups of loop.samples_per_prompt answers, each turn cut off at rollout.sampling.max_new_tokens."""
    size, most = config.loop.samples_per_prompt, config.rollout.sampling.max_new_tokens
    return [[_cut(group[i % len(group)], most) for i in range(size)] for group in lengths]


def _cut(answer: AnswerLengths, most: int) -> AnswerLengths:
    over = sum(max(0, turn.output - most) for turn in answer.turns)
    if not over:
        return answer
    turns = tuple(replace(turn, output=min(turn.output, most)) for turn in answer.turns)
    return AnswerLengths(turns, answer.trained - over)
