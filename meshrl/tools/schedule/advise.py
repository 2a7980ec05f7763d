"""Predictions for the splits of a number of GPUs between training and sampling, and the recommendation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from meshrl.config.run import RunConfig
from meshrl.core.errors import ConfigError
from meshrl.core.files import write_text
from meshrl.tools.schedule.inputs import Inputs, cost_lines, measured, resized, with_assumed
from meshrl.tools.schedule.picture import picture
from meshrl.tools.schedule.predict import FIRST_STEPS, Prediction, predict, seconds
from meshrl.tools.schedule.setup import Setup

MAX_STALENESS = 4  # the largest that is tried; more has little to gain, and importance weights become worse
WORTH = 1.05  # a schedule with more staleness is recommended if it is this much faster
WORTH_VERSION = 1.02  # the same for one more version of max_staleness
MAX_SPLITS = 17
ANSWERS = 16384  # of a simulation, about


def advise(config: RunConfig, folder: Path | None, assumed: Sequence[str], gpus: int | None, out: Path | None) -> str:
    """The predictions and the recommendation as text; the timelines are written to `out`. folder: of a colocated run.

    Raises: ConfigError, MeshrlError.
    """
    count = config.cluster.num_train_ranks + config.cluster.num_rollout_ranks if gpus is None else gpus
    if count < 1:
        raise ConfigError(f"--gpus is {count}; it must be 1 or more")
    inputs = with_assumed(None if folder is None else measured(folder), assumed, config)
    found = best_of_each_kind(setup_of(config, inputs), count)
    text = describe(found, recommended(found), inputs)
    if out is None:
        return text
    write_text(out, picture(found))
    return f"{text}\nwrote {out}"


def setup_of(config: RunConfig, inputs: Inputs, num_steps: int | None = None) -> Setup:
    """The config's own schedule. num_steps: None = enough for means."""
    loop, cluster = config.loop, config.cluster
    answers = loop.prompts_per_step * loop.samples_per_prompt
    return Setup(
        kind=loop.kind,
        train_ranks=cluster.num_train_ranks,
        rollout_ranks=cluster.num_rollout_ranks,
        max_staleness=loop.staleness,
        num_steps=num_steps or FIRST_STEPS + MAX_STALENESS + min(24, max(6, ANSWERS // answers)),
        prompts_per_step=loop.prompts_per_step,
        max_running=config.rollout.max_running_requests,
        costs=inputs.costs,
        lengths=resized(inputs.lengths, config),
        oversampling=loop.oversampling,
        in_flight=loop.in_flight,
    )


def best_of_each_kind(base: Setup, gpus: int) -> list[Prediction]:
    """For each kind, the fastest split of the GPUs; for fully_async with the smallest max_staleness that is enough."""
    colocated = replace(base, kind="colocated", train_ranks=gpus, rollout_ranks=0, max_staleness=0)
    found = [predict(colocated)]
    if gpus < 2:
        return found
    found.append(_best_split(replace(base, kind="one_step_off", max_staleness=1), gpus))
    split = _best_split(replace(base, kind="fully_async", max_staleness=2), gpus)
    tried = {2: split}
    for versions in (1, 3, MAX_STALENESS):
        tried[versions] = predict(replace(split.setup, max_staleness=versions))
    chosen = tried[1]
    for versions in range(2, MAX_STALENESS + 1):
        if chosen.step_s > tried[versions].step_s * WORTH_VERSION ** (versions - chosen.setup.max_staleness):
            chosen = tried[versions]
    again = _best_split(chosen.setup, gpus)  # samplers that run further ahead may need fewer ranks
    return [*found, min(chosen, again, key=lambda prediction: prediction.step_s)]


def _best_split(base: Setup, gpus: int) -> Prediction:
    every = max(1, -(-(gpus - 1) // MAX_SPLITS))
    coarse = [*range(1, gpus, every)]
    best = _fastest(base, gpus, coarse)
    if every > 1:
        near = best.setup.train_ranks
        finer = [n for n in range(near - every + 1, near + every) if 0 < n < gpus and n != near]
        best = min(best, _fastest(base, gpus, finer), key=lambda p: p.step_s)
    return best


def _fastest(base: Setup, gpus: int, train_ranks: Iterable[int]) -> Prediction:
    setups = [replace(base, train_ranks=count, rollout_ranks=gpus - count) for count in train_ranks]
    return min(map(predict, setups), key=lambda prediction: prediction.step_s)


def recommended(found: Sequence[Prediction]) -> Prediction:
    """The schedule with the least staleness, unless a later one is clearly faster."""
    chosen = found[0]
    for other in found[1:]:
        if other.step_s * WORTH < chosen.step_s:
            chosen = other
    return chosen


def reason(found: Sequence[Prediction], chosen: Prediction) -> str:
    """Why this one is recommended."""
    others = [p for p in found if p is not chosen]
    compared = ", ".join(f"{p.step_s / chosen.step_s:.2f} x as fast as {p.setup.kind}" for p in others)
    if chosen is found[0]:
        text = "no other schedule is 5 % faster, and it has no staleness"
        return f"{text} ({compared})" if compared else "one GPU can only sample and train in turn"
    longer = "training" if chosen.train_idle < chosen.rollout_idle else "sampling"
    if min(chosen.train_idle, chosen.rollout_idle) > 0.25:
        longer = "the time of the longest answers"
    versions = f"samples are {chosen.staleness:.1f} versions old on average, {chosen.max_staleness} at most"
    return f"it is {compared}; {longer} limits it; {versions}"


def describe(found: Sequence[Prediction], chosen: Prediction, inputs: Inputs) -> str:
    """The table, the recommendation and the assumptions, for the terminal."""
    heads = (
        "loop.kind",
        "train",
        "rollout",
        "max_staleness",
        "step",
        "train idle",
        "rollout idle",
        "idle",
        "staleness",
    )
    rows = [heads, *(_row(prediction) for prediction in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    table = [
        "  ".join(text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(zip(row, widths)))
        for row in rows
    ]
    setup = chosen.setup
    config = [f"loop.kind={setup.kind}", f"cluster.num_train_ranks={setup.train_ranks}"]
    config += [f"cluster.num_rollout_ranks={setup.rollout_ranks}"]
    if setup.kind == "fully_async":
        config.append(f"loop.max_staleness={setup.max_staleness}")
    return "\n".join(
        [
            *table,
            "",
            f"recommended: {' '.join(config)}",
            f"  {reason(found, chosen)}",
            "",
            f"times: {inputs.source}",
            *(f"  {line}" for line in _wrapped(cost_lines(inputs.costs))),
            *(f"note: {note}" for note in inputs.notes),
            *ASSUMPTIONS,
        ]
    )


ASSUMPTIONS = (
    "assumed: training and decoding of different ranks do not slow each other down; training is linear in tokens and",
    "scales with the train ranks; a decode step is linear in its rows; a sync takes as long on any number of ranks;",
    "tools take no time. Evaluations and checkpoints are left out. Memory, and what staleness costs, are not checked.",
)


def _row(p: Prediction) -> tuple[str, ...]:
    setup = p.setup
    return (
        setup.kind,
        str(setup.train_ranks),
        str(setup.rollout_ranks) if setup.rollout_ranks else "same",
        str(setup.max_staleness),
        seconds(p.step_s),
        f"{p.train_idle:.0%}",
        f"{p.rollout_idle:.0%}",
        f"{p.idle:.0%}",
        f"{p.staleness:.2f} (max {p.max_staleness})",
    )


def _wrapped(words: Sequence[str], width: int = 110) -> list[str]:
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + word
    return lines
